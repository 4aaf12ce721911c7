"""The sizes that the kernel sweeps try."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from jax import Array

from benchmarks import kernel_cases, kernels
from pallas_kernels.paged_decode import mosaic_gpu as decode
from pallas_kernels.paged_extend import mosaic_gpu as extend


def test_a_sweep_tries_the_sizes_in_use_first_and_none_twice():
    sweeps = {
        decode.default_tuning(128): kernel_cases.decode_tunings(2, 128),
        decode.default_tuning(128, 1): kernel_cases.decode_tunings(1, 128),
        decode.default_tuning(64): kernel_cases.decode_tunings(2, 64),
        extend.default_tuning(128): kernel_cases.extend_tunings(),
    }
    for in_use, tried in sweeps.items():
        assert tried[0] == in_use
        assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("head_dim", sorted(kernel_cases.DECODE_HEADS))
def test_what_is_timed_can_be_traced(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "seconds_a_call", trace)
    pool = (jnp.zeros((8, 8, 64, head_dim), jnp.bfloat16),) * 2
    tuning = kernel_cases.decode_tunings(2, head_dim)[-1]
    kernels.time_decode(kernel_cases.DecodeShape(2, 100, 4), tuning, pool, profile=False)
    if head_dim == 128:
        kernels.time_extend(kernel_cases.ExtendShape(1, 128, 0, 8, 4), None, None, profile=False)


def trace(fn: Any, q: Array, args: tuple[Any, ...], *calls: int, **repeats: int) -> int:
    """A second a call, of a function that is traced alone."""
    fn.trace(q, *args)
    return 1
