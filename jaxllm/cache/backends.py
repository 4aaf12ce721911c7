"""Chooses the attention back end, once at start, from the device and the shapes of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.typing import DTypeLike

from jaxllm.config import ATTENTION_BACKENDS, ConfigError
from pallas_kernels import paged_decode, paged_extend

FALLBACK = "xla"
HOPPER = "9.0"
HOPPER_TILE = 128  # keys at most, of paged decode and extend
# Widths of heads that a back end takes, in ascending order: other heads are stored with zeros
WIDTHS = {"mosaic_gpu": (64, 128, 256)}
HOMES = {
    "mosaic_gpu": f"an NVIDIA GPU of compute capability {HOPPER} (Hopper)",
    "mosaic_tpu": "a TPU",
}


@dataclass(frozen=True)
class Backend:
    """A back end of both attention ops.

    Attributes:
        reason: Of the choice.
        head_dim: Width at which it wants heads stored.
    """

    name: str
    reason: str
    head_dim: int


@dataclass(frozen=True)
class Shapes:
    """Shapes that a back end may refuse.

    Attributes:
        group: Query heads per KV head.
        kv_dtype: The pages' type; None = `dtype`.
    """

    dtype: DTypeLike
    head_dim: int
    page_size: int
    group: int
    kv_dtype: DTypeLike | None = None


def choose_backend(device: Any, shapes: Shapes, asked: str | None = None) -> Backend:
    """The back end that was asked for; else the device's own; else, where that does not take these
    shapes, the fallback. Raises ConfigError when the one asked for cannot run here."""
    own, reason = own_backend(device)
    if asked is not None:
        _check_asked(device, shapes, asked, own)
        return _stored(asked, "as asked", shapes)
    refused = refusal(own, shapes)
    if refused is None:
        return _stored(own, reason, shapes)
    return Backend(FALLBACK, refused, shapes.head_dim)


def stored_dim(name: str, head_dim: int) -> int:
    """The width at which a back end wants heads stored: the next that it takes, or their own."""
    return next((width for width in WIDTHS.get(name, ()) if width >= head_dim), head_dim)


def _stored(name: str, reason: str, shapes: Shapes) -> Backend:
    width = stored_dim(name, shapes.head_dim)
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


def refusal(name: str, shapes: Shapes) -> str | None:
    """The reason why a back end does not take these shapes, with heads as it wants them; None when
    both ops do."""
    width = stored_dim(name, shapes.head_dim)
    q = jax.ShapeDtypeStruct((1, shapes.group, width), shapes.dtype)
    pages = jax.ShapeDtypeStruct((1, 1, shapes.page_size, width), shapes.kv_dtype or shapes.dtype)
    for op in (paged_decode, paged_extend):
        try:
            op.BACKENDS.check(name, q, pages, pages)
        except ValueError as error:
            return str(error)
    return None


def _check_asked(device: Any, shapes: Shapes, asked: str, own: str) -> None:
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
