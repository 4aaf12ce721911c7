"""Decisions before anything is loaded, and the pool once the largest step is known."""

from __future__ import annotations

from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.resolve import resized, resolve
from jaxllm.mesh import make_mesh


def test_a_smaller_step_leaves_a_larger_pool_and_changes_nothing_else(tiny_dir: str) -> None:
    config = EngineConfig(model=tiny_dir, max_model_len="auto", max_num_seqs=4, max_num_batched_tokens=64)
    before = resolve(config, Path(tiny_dir), make_mesh(1))
    room = before.memory.room
    tight = resized(before, config, room.workspace + room.left - 20 * before.need.page_bytes)
    assert tight.resolved.num_pages == 20
    assert tight.resolved.max_model_len == 20 * tight.resolved.page_size < before.resolved.max_model_len
    assert tight.memory.room.left - 20 * before.need.page_bytes == 0
    assert resized(tight, config, room.workspace) == before


def test_a_pool_that_was_asked_for_keeps_its_size(tiny_dir: str) -> None:
    config = EngineConfig(model=tiny_dir, num_gpu_blocks_override=50, max_num_seqs=4, max_num_batched_tokens=64)
    before = resolve(config, Path(tiny_dir), make_mesh(1))
    assert resized(before, config, before.memory.room.workspace // 2).resolved == before.resolved
