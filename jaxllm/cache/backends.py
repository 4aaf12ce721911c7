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
HOMES = {
    "mosaic_gpu": f"an NVIDIA GPU of compute capability {HOPPER} (Hopper)",
    "mosaic_tpu": "a TPU",
}


@dataclass(frozen=True)
class Backend:
    """The name of a back end of both attention ops, and the reason of the choice."""

    name: str
    reason: str


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
        return Backend(asked, "as asked")
    refused = refusal(own, shapes)
    return Backend(own, reason) if refused is None else Backend(FALLBACK, refused)


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
    """The reason why a back end does not take these shapes; None when both ops do."""
    q = jax.ShapeDtypeStruct((1, shapes.group, shapes.head_dim), shapes.dtype)
    pages = jax.ShapeDtypeStruct(
        (1, 1, shapes.page_size, shapes.head_dim), shapes.kv_dtype or shapes.dtype
    )
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
