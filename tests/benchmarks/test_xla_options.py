"""Which options the table gets for measured times, and a table that the engine reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.xla_options import ALL_ROWS, choose, measure, write
from jaxllm.engine.runtime.compilation.xla_options import XlaOptions

OFF = {"triton": False}


def test_neighbours_with_the_same_options_share_an_entry_and_the_default_needs_none() -> None:
    times = {
        ("decode", 1): (3.0, 3.3),
        ("decode", 64): (5.0, 4.5),
        ("decode", 256): (9.0, 8.0),
        ("extend", 64): (5.0, 4.0),
    }
    assert choose([times], [{}, OFF]) == [
        {"program": "decode", "rows": [2, ALL_ROWS], "options": OFF},
        {"program": "extend", "rows": [1, ALL_ROWS], "options": OFF},
    ]


def test_a_gain_within_the_noise_changes_nothing() -> None:
    assert choose([{("decode", 1): (3.0, 2.98)}], [{}, OFF]) == []


def test_models_count_alike_whatever_their_size() -> None:
    large, small = {("decode", 64): (50.0, 45.0)}, {("decode", 64): (1.0, 1.2)}
    assert choose([large, small], [{}, OFF]) == []
    assert choose([large, large, small], [{}, OFF]) == []
    assert choose([large], [{}, OFF])


def test_the_engine_reads_what_is_written(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"ms": {}, "programs": [{"program": "decode", "rows": [2, ALL_ROWS], "options": OFF}]},
    )
    assert XlaOptions.of(path.stem, folder=tmp_path).at("decode", 4) == OFF


@pytest.mark.slow
def test_every_forward_program_is_timed_with_every_candidate() -> None:
    options = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 8,
    }
    times = measure("demo", options, [{}, {"xla_embed_ir_in_executable": True}])
    assert sorted(times) == [("decode", 1), ("decode", 2), ("extend", 16), ("extend", 18)]
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in times.values())
