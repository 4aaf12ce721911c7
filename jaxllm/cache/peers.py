"""The inboxes by which GPUs of one process add up a model's layers: the choice, and their owner."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.mesh import LAYER, layer_devices
from pallas_kernels import all_reduce
from pallas_kernels.all_reduce import Group, Inbox
from pallas_kernels.all_reduce import Layout as Layout
from pallas_kernels.all_reduce import by_inboxes as by_inboxes
from pallas_kernels.all_reduce.inboxes import Inboxes as Inboxes
from pallas_kernels.all_reduce.inboxes import PeerTimeout as PeerTimeout
from pallas_kernels.all_reduce.inboxes import shapes
from pallas_kernels.all_reduce.plan import layout_for
from pallas_kernels.all_reduce.trial import refusal

BACKEND = all_reduce.inbox_backend()
XLA = all_reduce.portable_backend()
PAIR = 8  # bytes of a row's best logit and its token


class Sums(NamedTuple):
    """How devices add up their parts.

    Attributes:
        all_reduce: a back end of `pallas_kernels.all_reduce`.
        all_reduce_reason: of the choice.
    """

    all_reduce: str
    all_reduce_reason: str

    @property
    def by_inboxes(self) -> bool:
        """Whether devices have inboxes."""
        return by_inboxes(self.all_reduce)


def choose_sums(mesh: Mesh, rows: int, width: int, dtype: Any) -> Sums:
    """Inboxes where the devices reach each other's memory, which is tried, and the kernel takes
    sums of `[rows, width]`; else XLA's collectives."""
    if mesh.size == 1:
        return Sums(XLA, "one device")
    part = jax.ShapeDtypeStruct((rows, width), dtype)
    inbox = Inbox(None, None, inbox_layout(mesh, rows, width, rows))
    group = Group(LAYER, layer_devices(mesh), inbox)
    try:
        all_reduce.ALL_REDUCE.check(BACKEND, group, part)
    except ValueError as error:
        return Sums(XLA, str(error))
    refused = refusal(mesh, LAYER)
    if refused is None:
        return Sums(BACKEND, "a trial was right")
    return Sums(XLA, refused)


def inbox_layout(mesh: Mesh, rows: int, width: int, logit_rows: int) -> Layout:
    """Inboxes for sums of 16-bit `[rows, width]`, and greedy draws of `logit_rows`."""
    return layout_for(layer_devices(mesh), rows, 2 * width, PAIR * logit_rows)


def inbox_shapes(mesh: Mesh, layout: Layout) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`Inboxes.arrays` before there are any."""
    return shapes(NamedSharding(mesh, PartitionSpec(LAYER)), layout)
