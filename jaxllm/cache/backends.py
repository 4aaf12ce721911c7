"""Chooses the back end of attention, once at start, for a target and the shapes of one call.

The ops of attention are chosen together, since they share the width of heads, the layout of pages
and the tile: a back end of a model is one name in the tables of all its ops. Other ops choose their
own, see `pallas_kernels.backends`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxllm.config import ATTENTION_BACKENDS, ConfigError
from pallas_kernels import (
    latent_decode,
    latent_extend,
    paged_decode,
    paged_extend,
    segment_attention,
)
from pallas_kernels.backends import Backends, UnknownBackend
from pallas_kernels.target import HOPPER as HOPPER
from pallas_kernels.target import PORTABLE
from pallas_kernels.target import Target as Target

type Call = tuple[Backends, tuple[Any, ...]]  # an op, and the arrays of one call as shapes

PAGED = (paged_decode.BACKENDS, paged_extend.BACKENDS)
LATENT = (latent_decode.BACKENDS, latent_extend.BACKENDS)
SEGMENTS = (segment_attention.BACKENDS,)
ALL = paged_decode.BACKENDS  # has every back end of attention; other ops lack some


@dataclass(frozen=True)
class Backend:
    """A back end of all attention ops of a model.

    Attributes:
        reason: Of the choice.
        head_dim: Width at which it wants heads stored.
    """

    name: str
    reason: str
    head_dim: int

    @property
    def is_kernel(self) -> bool:
        """Whether it is more than plain JAX."""
        return not ALL.runs_anywhere(self.name)


@dataclass(frozen=True)
class Shapes:
    """Shapes over pages that a back end may refuse.

    Attributes:
        group: Query heads per KV head.
        kv_dtype: The pages' type; None = `dtype`.
    """

    dtype: DTypeLike
    head_dim: int
    page_size: int
    group: int
    kv_dtype: DTypeLike | None = None

    @property
    def stored_dtype(self) -> DTypeLike:
        """The type of stored keys and values."""
        return self.kv_dtype or self.dtype

    def width(self, name: str) -> int:
        """The width at which a back end wants these heads stored."""
        return stored_dim(name, self.head_dim, self.stored_dtype)

    def calls(self, width: int) -> Iterator[Call]:
        """One call of each op, with heads of `width`."""
        q = jax.ShapeDtypeStruct((1, self.group, width), self.dtype)
        pages = jax.ShapeDtypeStruct((1, 1, self.page_size, width), self.stored_dtype)
        for op in PAGED:
            yield op, (q, pages, pages)


@dataclass(frozen=True)
class LatentShapes(Shapes):
    """Shapes of latent attention: `head_dim` is the width of an entry, of which the first `rank`
    numbers are the value."""

    rank: int = 0

    def width(self, name: str) -> int:
        """Their own: entries are never stored wider."""
        return self.head_dim

    def calls(self, width: int) -> Iterator[Call]:
        """As of `Shapes`."""
        q = jax.ShapeDtypeStruct((1, self.group, width), self.dtype)
        pages = jax.ShapeDtypeStruct((1, self.page_size, width), self.stored_dtype)
        for op in LATENT:
            yield op, (q, pages, self.rank)


@dataclass(frozen=True)
class SegmentShapes:
    """Shapes of an encoder, which has no pages."""

    dtype: DTypeLike
    head_dim: int

    def width(self, name: str) -> int:
        """As of `Shapes`."""
        return stored_dim(name, self.head_dim, self.dtype, SEGMENTS)

    def calls(self, width: int) -> Iterator[Call]:
        """As of `Shapes`."""
        heads = jax.ShapeDtypeStruct((1, 1, width), self.dtype)
        for op in SEGMENTS:
            yield op, (heads, heads, heads)


def choose_backend(
    target: Target, shapes: Shapes | SegmentShapes, asked: str | None = None, device: str = ""
) -> Backend:
    """The back end that was asked for; else the first of the target's that takes these shapes.
    `device` is what the target is called. Raises ConfigError when the one asked for cannot run
    here."""
    if asked is not None:
        _check_asked(target, shapes, asked, device)
        return _stored(asked, "as asked", shapes)
    refusals: list[str] = []
    for name in _preferred(target, shapes):
        refused = refusal(name, shapes)
        if refused is None:
            return _stored(name, refusals[0] if refusals else reason_of(target), shapes)
        if not ALL.runs_anywhere(name):
            refusals.append(refused)
    raise ConfigError(f"no attention back end runs this model on {target.title}")


def choose_backends(
    target: Target,
    shapes: Sequence[Shapes | SegmentShapes],
    asked: str | None = None,
    device: str = "",
) -> list[Backend]:
    """The back end of each of a model's attentions, which all have the same one: one for each of
    these shapes, or the target's own where there are none. Raises ConfigError as
    `choose_backend`."""
    if not shapes:
        return [Backend(own_backend(target), reason_of(target), 0)]
    chosen = {call: choose_backend(target, call, asked, device) for call in dict.fromkeys(shapes)}
    names = {backend.name for backend in chosen.values()}
    if len(names) > 1:  # the first that takes all of them
        suited = (name for name in ALL.suited(target) if name in names)
        name = next(n for n in suited if all(refusal(n, call) is None for call in chosen))
        reason = next(backend.reason for backend in chosen.values() if backend.name == name)
        chosen = {call: _stored(name, reason, call) for call in chosen}
    return [chosen[call] for call in shapes]


def own_backend(target: Target) -> str:
    """The back end of a target's own, whatever the shapes."""
    return next(_preferred(target))


def _preferred(target: Target, shapes: Shapes | SegmentShapes | None = None) -> Iterator[str]:
    """The back ends that a target should use for these shapes or any, the first choice first. Where
    an op lacks one, the other ops' preferences count."""
    calls: list[Call] = [(op, ()) for op in PAGED]
    if shapes is not None:
        calls = [*shapes.calls(shapes.head_dim)]
    for name in ALL.suited(target):
        if all(op.prefers(name, target, *arrays) for op, arrays in calls if name in op):
            yield name


def stored_dim(
    name: str, head_dim: int, pages: DTypeLike, ops: tuple[Backends, ...] = PAGED
) -> int:
    """The width at which a back end wants heads stored in pages of this type: the next that its ops
    take, or their own."""
    widths = [head_dim]
    for op in ops:
        if name in op:
            taken = op.fact(name, "head_dims", _all_widths)(pages)
            widths.append(next((width for width in taken if width >= head_dim), head_dim))
    return max(widths)


def _all_widths(pages: DTypeLike) -> tuple[int, ...]:
    return ()


def _stored(name: str, reason: str, shapes: Shapes | SegmentShapes) -> Backend:
    width = shapes.width(name)
    if width != shapes.head_dim:
        reason = f"{reason}; heads of {shapes.head_dim} are stored as {width}, with zeros"
    return Backend(name, reason, width)


def reason_of(target: Target) -> str:
    """Why a target's own back end is what it is."""
    own = own_backend(target)
    is_portable = ALL.runs_anywhere(own) and target.platform != PORTABLE.platform
    if is_portable:
        return f"{target.title} has no kernel of its own"
    return target.title


def tile_tokens(name: str) -> int:
    """Keys that a back end reads at once, seen or not; 1 where it skips pages before a window, or
    reads them as zeros."""
    return max([op.fact(name, "TILE_TOKENS", 1) for op in PAGED if name in op], default=1)


def refusal(name: str, shapes: Shapes | SegmentShapes) -> str | None:
    """The reason why a back end does not take these shapes, with heads as it wants them; None when
    all ops do."""
    try:
        for op, arrays in shapes.calls(shapes.width(name)):
            op.check(name, *arrays)
    except (ValueError, UnknownBackend) as error:
        return str(error)
    return None


def _check_asked(target: Target, shapes: Shapes | SegmentShapes, asked: str, device: str) -> None:
    if asked not in ATTENTION_BACKENDS:
        raise ConfigError(
            f"--attention-backend must be one of {', '.join(ATTENTION_BACKENDS)}, got {asked!r:.80}"
        )
    needs = ALL.needs[asked]
    if not needs.met_by(target):
        raise ConfigError(
            f"--attention-backend {asked} needs {needs.title}, and this device is {device}; leave"
            " it out"
        )
    if refused := refusal(asked, shapes):
        raise ConfigError(
            f"--attention-backend {asked} cannot run this model ({refused}); leave it out"
        )
