"""Chooses the attention back end, once at start, from the device and the shapes of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from pallas_kernels.backends import UnknownBackend, head_dims

FALLBACK = "xla"
HOPPER = "9.0"
HOPPER_TILE = 128  # keys at most, of paged decode and extend
HOMES = {
    "mosaic_gpu": f"an NVIDIA GPU of compute capability {HOPPER} (Hopper)",
    "mosaic_tpu": "a TPU",
}


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


@dataclass(frozen=True)
class Shapes:
    """Shapes over pages that a back end may refuse.

    Attributes:
        group: Query heads per KV head.
        kv_dtype: The pages' type; None = `dtype`.
    """

    fallback: ClassVar[str] = FALLBACK
    dtype: DTypeLike
    head_dim: int
    page_size: int
    group: int
    kv_dtype: DTypeLike | None = None

    @property
    def stored_dtype(self) -> DTypeLike:
        """The type of stored keys and values."""
        return self.kv_dtype or self.dtype

    def check(self, name: str, width: int) -> None:
        """Raise ValueError if a back end does not take these shapes with heads of `width`."""
        q = jax.ShapeDtypeStruct((1, self.group, width), self.dtype)
        pages = jax.ShapeDtypeStruct((1, 1, self.page_size, width), self.stored_dtype)
        for op in (paged_decode, paged_extend):
            op.BACKENDS.check(name, q, pages, pages)


@dataclass(frozen=True)
class LatentShapes(Shapes):
    """Shapes of latent attention: `head_dim` is the width of an entry, of which the first `rank`
    numbers are the value."""

    rank: int = 0

    def check(self, name: str, width: int) -> None:
        """As of `Shapes`; entries are never stored wider."""
        if width != self.head_dim:
            raise ValueError(f"{name} takes no latent entries of {self.head_dim} numbers")
        q = jax.ShapeDtypeStruct((1, self.group, width), self.dtype)
        pages = jax.ShapeDtypeStruct((1, self.page_size, width), self.stored_dtype)
        for op in (latent_decode, latent_extend):
            op.BACKENDS.check(name, q, pages, self.rank)


@dataclass(frozen=True)
class SegmentShapes:
    """Shapes of an encoder, which has no pages."""

    fallback: ClassVar[str] = "reference"
    dtype: DTypeLike
    head_dim: int

    @property
    def stored_dtype(self) -> DTypeLike:
        """As of `Shapes`."""
        return self.dtype

    def check(self, name: str, width: int) -> None:
        """As of `Shapes`. Raises UnknownBackend for a back end that this op does not have."""
        heads = jax.ShapeDtypeStruct((1, 1, width), self.dtype)
        segment_attention.BACKENDS.check(name, heads, heads, heads)


def choose_backend(
    device: Any, shapes: Shapes | SegmentShapes, asked: str | None = None
) -> Backend:
    """The back end that was asked for; else the device's own; else, where that does not take these
    shapes, the fallback. Raises ConfigError when the one asked for cannot run here."""
    own, reason = own_backend(device)
    if asked is not None:
        _check_asked(device, shapes, asked, own)
        return _stored(asked, "as asked", shapes)
    refused = reason if own == FALLBACK else refusal(own, shapes)
    if refused is None:
        return _stored(own, reason, shapes)
    return Backend(shapes.fallback, refused, shapes.head_dim)


def choose_backends(
    device: Any, shapes: Sequence[Shapes | SegmentShapes], asked: str | None = None
) -> list[Backend]:
    """The back end of each of a model's attentions: the same one for all, so the fallback where
    one of them needs it. Raises ConfigError as `choose_backend`."""
    chosen = {call: choose_backend(device, call, asked) for call in dict.fromkeys(shapes)}
    if len({backend.name for backend in chosen.values()}) > 1:
        reason = next(
            backend.reason for call, backend in chosen.items() if backend.name == call.fallback
        )
        chosen = {call: Backend(call.fallback, reason, call.head_dim) for call in chosen}
    return [chosen[call] for call in shapes]


def stored_dim(name: str, head_dim: int, pages: DTypeLike) -> int:
    """The width at which a back end wants heads stored in pages of this type: the next that it
    takes, or their own."""
    return next((width for width in head_dims(name, pages) if width >= head_dim), head_dim)


def _stored(name: str, reason: str, shapes: Shapes | SegmentShapes) -> Backend:
    width = stored_dim(name, shapes.head_dim, shapes.stored_dtype)
    if width != shapes.head_dim:
        reason = f"{reason}; heads of {shapes.head_dim} are stored as {width}, with zeros"
    return Backend(name, reason, width)


def own_backend(device: Any) -> tuple[str, str]:
    """The fastest back end of a device, and the reason."""
    capability = getattr(device, "compute_capability", None)
    if device.platform == "cpu":
        return "reference", "CPU"
    if device.platform == "tpu":
        return "mosaic_tpu", "TPU"
    if capability == HOPPER:
        return "mosaic_gpu", f"compute capability {capability}"
    name = f"compute capability {capability}" if capability else device.platform
    return FALLBACK, f"{name} has no kernel of its own"


def tile_tokens(name: str) -> int:
    """Keys that a back end reads at once, seen or not; 1 where it skips pages before a window, or
    reads them as zeros."""
    return HOPPER_TILE if name == "mosaic_gpu" else 1


def refusal(name: str, shapes: Shapes | SegmentShapes) -> str | None:
    """The reason why a back end does not take these shapes, with heads as it wants them; None when
    all ops do."""
    try:
        shapes.check(name, stored_dim(name, shapes.head_dim, shapes.stored_dtype))
    except (ValueError, UnknownBackend) as error:
        return str(error)
    return None


def _check_asked(device: Any, shapes: Shapes | SegmentShapes, asked: str, own: str) -> None:
    if asked not in ATTENTION_BACKENDS:
        raise ConfigError(
            f"--attention-backend must be one of {', '.join(ATTENTION_BACKENDS)}, got {asked!r:.80}"
        )
    if asked in HOMES and asked != own:
        raise ConfigError(
            f"--attention-backend {asked} needs {HOMES[asked]}, and this device is"
            f" {device.device_kind}; leave it out"
        )
    if refused := refusal(asked, shapes):
        raise ConfigError(
            f"--attention-backend {asked} cannot run this model ({refused}); leave it out"
        )
