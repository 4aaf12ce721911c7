"""The sizes that the kernel sweeps try."""

from __future__ import annotations

from benchmarks import kernel_cases
from pallas_kernels.paged_decode import mosaic_gpu as decode
from pallas_kernels.paged_extend import mosaic_gpu as extend


def test_a_sweep_tries_the_sizes_in_use_first_and_none_twice():
    sweeps = {
        decode.default_tuning(128): kernel_cases.decode_tunings(),
        decode.default_tuning(128, 1): kernel_cases.decode_tunings(1),
        extend.default_tuning(128): kernel_cases.extend_tunings(),
    }
    for in_use, tried in sweeps.items():
        assert tried[0] == in_use
        assert len(set(tried)) == len(tried)
