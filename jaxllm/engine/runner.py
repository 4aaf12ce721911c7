"""Owns everything on the device: weights, KV pages, slot state. Launches plans and collects their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxllm.cache.kv import KVCache
from jaxllm.engine.batch import ingest_arrays, ingest_shapes, pack
from jaxllm.engine.buckets import ExtendShape
from jaxllm.engine.compiles import CompileCounter
from jaxllm.engine.plan import Plan
from jaxllm.engine.programs import Programs, place
from jaxllm.engine.state import SlotState
from jaxllm.sampling.sample import Sampled, Sampler


@dataclass(frozen=True)
class StepResult:
    """A step in flight: who ran, in which rows their tokens will be, and the sampled values still on the device."""

    plan: Plan
    rows: tuple[int, ...]  # row of each decode, then of each chunk
    sampled: Sampled
    with_logprobs: bool


@dataclass(frozen=True)
class Collected:
    """A finished step on the host: tokens per planned decode and chunk (-1: none, -2: the logits were not finite)."""

    plan: Plan
    tokens: list[int]
    logprobs: list[tuple[float, int, list[tuple[int, float]]]] | None  # chosen logprob, rank, top entries


class Runner:
    """`launch(plan) -> StepResult` never waits for the device; `collect(result)` does."""

    def __init__(self, programs: Programs, weights: tuple[Array, ...], kv: KVCache, eos_ids: list[int], compiles: CompileCounter):
        self.programs, self.weights, self.kv, self.eos_ids, self.compiles = programs, weights, kv, eos_ids, compiles
        self.slots = programs.slots
        self.page_size = programs.model.page_size
        self.state: SlotState = place(SlotState.zeros(self.slots, programs.table_width), programs.state)
        self._rows_on_device: tuple[int, ...] = ()

    def launch(self, plan: Plan) -> StepResult:
        """Start one step. Host work only: pad, upload what changed, dispatch forward and sample."""
        self._ingest(plan)
        buckets = self.programs.buckets
        if plan.chunks:
            tokens = sum(chunk.length for chunk in plan.chunks)
            shape = buckets.fit_extend(tokens, len(plan.chunks), len(plan.decodes))
            logits, slots, emit = self._extend(shape, plan)
            rows = (*range(len(plan.decodes)), *range(shape.decodes, shape.decodes + len(plan.chunks)))
        else:
            bucket = buckets.fit_decode(len(plan.decodes))
            program = self.programs.get("decode", bucket)
            self.kv, logits, slots, emit = program(self.weights, self.kv, self.state)
            rows = tuple(range(len(plan.decodes)))
        sampler = self._sampler(plan)
        self.state, sampled = self.programs.get("sample", (logits.shape[0], sampler))(logits, slots, emit, self.state)
        wanted = sampled if sampler is Sampler.LOGPROBS else sampled.token_B
        jax.tree.map(lambda x: x.copy_to_host_async(), wanted)
        return StepResult(plan, rows, sampled, sampler is Sampler.LOGPROBS)

    def collect(self, result: StepResult) -> Collected:
        """Wait for a step's tokens."""
        token = np.asarray(result.sampled.token_B)
        tokens = [int(token[row]) for row in result.rows]
        return Collected(result.plan, tokens, _logprobs(result) if result.with_logprobs else None)

    def warm_up(self) -> None:
        """Run every program once on padding rows, which touch the trash slot and the dropped page only."""
        empty = Plan(decodes=(), positions=(), chunks=())
        self._ingest(empty, force=True)
        for shape in self.programs.buckets.extend:
            self._warm_up_samplers(*self._extend(shape, empty))
        for rows in self.programs.buckets.decode:
            self.kv, *out = self.programs.get("decode", rows)(self.weights, self.kv, self.state)
            self._warm_up_samplers(*out)
        jax.block_until_ready(self.state)

    def reset(self) -> None:
        """After a step that failed: slot state and pages anew, since donated buffers may be gone and pages half written."""
        for pages in jax.tree.leaves(self.kv):
            pages.delete()  # first: a device has no room for two pools
        self.kv = KVCache.empty(self.programs.abstract.kv)
        self.state = place(SlotState.zeros(self.slots, self.programs.table_width), self.programs.state)
        self._rows_on_device = ()

    def _warm_up_samplers(self, logits: Array, slots: Array, emit: Array) -> None:
        for sampler in Sampler:
            self.state, sampled = self.programs.get("sample", (logits.shape[0], sampler))(logits, slots, emit, self.state)
            np.asarray(sampled.token_B)

    def _extend(self, shape: ExtendShape, plan: Plan) -> tuple[Array, Array, Array]:
        program = self.programs.get("extend", shape)
        layout = self.programs.layout(shape)
        buffer = self._upload(layout.pack(plan.chunks, self.slots, self.eos_ids))
        self.kv, self.state, logits, slots, emit = program(self.weights, self.kv, self.state, buffer)
        return logits, slots, emit

    def _ingest(self, plan: Plan, force: bool = False) -> None:
        """Skipped in steady decode: same rows, no new page."""
        rows = tuple(request.slot for request in plan.decodes)
        arrays, grew = ingest_arrays(plan, self.slots, self.page_size)
        if not (force or grew or (rows != self._rows_on_device)):
            return
        buffer = self._upload(pack(arrays, ingest_shapes(self.slots)))
        self.state = self.programs.get("ingest", None)(self.state, buffer)
        self._rows_on_device = rows

    def _upload(self, buffer: np.ndarray) -> Array:
        return jax.device_put(buffer, self.programs.replicated)

    def _sampler(self, plan: Plan) -> Sampler:
        drawing: list[Any] = [request.sampler for request in plan.decodes]
        drawing += [chunk.request.sampler for chunk in plan.chunks if chunk.final]
        return Sampler(max(drawing, default=0))


def _logprobs(result: StepResult) -> list[tuple[float, int, list[tuple[int, float]]]]:
    sampled = result.sampled
    chosen, rank = np.asarray(sampled.logprob_B), np.asarray(sampled.rank_B)
    ids, values = np.asarray(sampled.top_ids_BN), np.asarray(sampled.top_logprobs_BN)
    return [(float(chosen[row]), int(rank[row]), list(zip(ids[row].tolist(), values[row].tolist(), strict=True))) for row in result.rows]
