"""A server in this process with an engine that computes, in few shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxllm.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.load import load_engine
from jaxllm.server.engine.loading import Factory
from tests.engine.conftest import write_random
from tests.engine.few_shapes import few_shapes
from tests.server.harness import Running


class Real(Running):
    """A server with an engine that computes."""

    def __init__(self, engine: Engine):
        super().__init__(engine.tokenizer)
        self.engine = engine

    def factory(self) -> Factory:
        """The engine that is there."""
        return lambda config, on_phase: self.engine


def served(folder: Path, repo: Path) -> Iterator[Real]:
    """One with random weights, which are written to `folder`; nothing may be left of requests."""
    config = EngineConfig(
        model=write_random(folder, repo),
        load_format="dummy",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        block_size=16,
        num_gpu_blocks_override=64,
        enforce_eager=True,
    )
    with few_shapes():
        engine = load_engine(config)
    with Real(engine) as running:
        yield running
    running.engine.scheduler.check()
    assert running.engine.stats().free_pages == running.engine.stats().num_pages
