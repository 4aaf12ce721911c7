"""Launches the plans of a pooling model and collects their vectors."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

import numpy as np
from jax import Array

from jaxllm.cache.arrays import KVCache
from jaxllm.engine.runtime.dispatch import RECORDING_RUNS, Dispatcher
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.launch import Launch, read
from jaxllm.engine.runtime.program import MAX_DEPTH, Key
from jaxllm.engine.runtime.programs.encode import pack_prompts
from jaxllm.engine.scheduling.buckets import ExtendShape
from jaxllm.engine.scheduling.kv_offload import Link
from jaxllm.engine.scheduling.plan import Plan


class PooledStep(NamedTuple):
    """A step in flight: `vectors` has a row [R, E] for each chunk of the plan, or [T, E] for each
    token of the chunks."""

    plan: Plan
    vectors: Array

    @property
    def group(self) -> int:
        """Of the slots that run."""
        return self.plan.group


class PoolingRunner(Dispatcher):
    """`launch(plan)` never waits for the device; `collect(step)` does.

    A step is one program, and what it needs of a request comes with its chunk. `depth` steps may be
    launched before the first of them is collected.
    """

    def __init__(self, programs: Programs, weights: tuple[Array, ...], kv: KVCache):
        super().__init__(programs, weights, kv)
        if self.shapes.platform == "cpu":
            self.depth = 1
        else:
            self.depth = MAX_DEPTH
        pooling = self.shapes.pooling
        self._encodes = pooling is not None and pooling.bidirectional
        self._of_tokens = pooling is not None and pooling.of_tokens
        self.seconds: dict[object, float] = {}  # of each shape, measured in warm-up
        self.link: Link | None = None  # no pages move to host memory
        self._start_empty(kv)

    def launch(self, plan: Plan) -> PooledStep:
        """Start a step. Host work only: pack, upload, dispatch."""
        tokens = sum(chunk.length for chunk in plan.chunks)
        shape = self.shapes.buckets.fit_extend(tokens, len(plan.chunks), 0)
        return PooledStep(plan, self._run(plan, shape))

    def collect(self, step: PooledStep) -> list[np.ndarray]:
        """Wait for a step's results, float32: of each chunk [E], or [its tokens, E]."""
        found = read(step.vectors)
        chunks = step.plan.chunks
        if not self._of_tokens:
            return [*found[: len(chunks)]]
        ends = itertools.accumulate(chunk.length for chunk in chunks)
        return [found[end - chunk.length : end] for chunk, end in zip(chunks, ends, strict=True)]

    def warm_up(self, deep: bool = False) -> None:
        """Run every program on padding rows: once to load it, once to record it, once to time
        it."""
        empty = Plan(decodes=(), chunks=())
        for shape in self.shapes.buckets.extend:
            for _ in range(RECORDING_RUNS):
                start = time.perf_counter()
                read(self._run(empty, shape))
                self.seconds[shape] = time.perf_counter() - start

    def _run(self, plan: Plan, shape: ExtendShape) -> Array:
        sizes = shape.tokens, shape.chunks
        if self._encodes:
            key = Key("encode", sizes)
            buffer = pack_prompts(plan.chunks, *sizes)
        else:
            key = Key("pool", sizes)
            layout = self.shapes.chunk_layouts[shape]
            buffer = np.zeros(layout.arrays.size, np.int32)
            layout.pack_chunks(buffer, plan.chunks, self.shapes.slots)
        (vectors,) = self.run(Launch(((key, buffer),)))
        return vectors
