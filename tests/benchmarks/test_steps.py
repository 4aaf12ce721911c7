"""Step programs of shapes that are no engine's."""

from __future__ import annotations

import argparse
import time

import pytest

from benchmarks.steps import chosen, measured, pair, timed
from jaxllm.engine.scheduling.buckets import Buckets


def test_a_shape_is_tokens_and_rows() -> None:
    assert (pair("512+32"), pair("64")) == ((512, 32), (64, 0))


def test_calls_follow_each_other_for_the_time_that_was_asked_for() -> None:
    calls: list[float] = []
    start = time.perf_counter()
    each = timed(lambda: calls.append(time.perf_counter()), 0.01)
    assert time.perf_counter() - start >= 0.01
    assert 0 < each <= 0.01 / 3 and len(calls) > 4


def test_the_lattice_has_the_shapes_that_were_named_and_logits_for_all() -> None:
    found = chosen(Buckets.build(256, 8192, "gpu"), [48], [(1120, 32), (2048, 0)])
    assert found.decode == (48, 256)
    assert {(s.tokens, s.decodes) for s in found.extend} == {(1120, 32), (2048, 0), (7936, 256)}
    assert all(found.logit_rows(shape) >= shape.decodes + shape.chunks for shape in found.extend)


@pytest.mark.slow
def test_programs_are_timed_under_load() -> None:
    options = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": 16,
    }
    rows = measured(
        argparse.Namespace(model="demo", decode=[3], extend=[(16, 2)], seconds=0.01), options
    )
    assert [(row["tokens"], row["decodes"]) for row in rows] == [(16, 2), (0, 3)]
    assert all(row["ms"] > 0 and row["rows_per_ms"] > 0 for row in rows)
