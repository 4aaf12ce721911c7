"""Owns everything on the device: weights, KV pages, slot state. Launches plans and collects their
tokens."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax import Array

from jaxllm.cache.kv import DROP_PAGE, KVCache, zeros_of
from jaxllm.engine.constraints.host_processors import run_host_processors
from jaxllm.engine.runtime.batch import pack, update_arrays
from jaxllm.engine.runtime.compile_counter import CompileCounter
from jaxllm.engine.runtime.host_buffers import HostBuffers, begin_read, read
from jaxllm.engine.runtime.logits_processing import Fill, LogitsProcessing
from jaxllm.engine.runtime.page_swapper import PageSwapper
from jaxllm.engine.runtime.programs import Programs, place
from jaxllm.engine.runtime.prompt_scores import PromptScores, asked_of
from jaxllm.engine.runtime.state import SlotState
from jaxllm.engine.runtime.step import ForwardOutput
from jaxllm.engine.scheduling.buckets import ExtendShape
from jaxllm.engine.scheduling.kv_offload import Link
from jaxllm.engine.scheduling.plan import Moves, Plan, Span, Traffic, spans
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.logprobs import StepLogprobs
from jaxllm.sampling.choose import LOGPROBS, Sampler, sampler_of

MAX_DEPTH = 2  # steps in flight
SHORT_STEP = 2e-3  # seconds; below it one step in flight does not keep the device busy
# XLA runs a program's kernels one by one, then records them, then replays the recording
RECORDING_RUNS = 3


@dataclass(frozen=True)
class Forwarded:
    """A step whose forward was launched and whose draw was not: who ran, and in which rows."""

    plan: Plan
    rows: Sequence[int]
    forward_output: ForwardOutput
    kinds: frozenset[int]  # the different `needs` of those who draw
    scored: PromptScores | None


@dataclass(frozen=True)
class StepResult:
    """A step in flight: who ran, in which rows their tokens will be, and what is still on the
    device.
    """

    plan: Plan
    rows: Sequence[int]  # row of each decode, then of each chunk
    token: Array
    packed: Array | None  # log-probabilities, if anybody asks for them
    scored: PromptScores | None = None
    # By index of the row in `rows`: why it has no token
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Collected:
    """A finished step on the host: tokens per planned decode and chunk (-1: none, -2: the logits
    were not finite)."""

    plan: Plan
    tokens: list[int]
    logprobs: StepLogprobs | None
    scores: list[tuple[Span, np.ndarray]]  # of prompts, in their packed form
    # Why a row has no token, where more is known
    failures: dict[int, str] = field(default_factory=dict)


class Runner:
    """`forward(plan)` and `draw(forwarded) -> StepResult` never wait for the device;
    `collect(result)` does. Masks of the requests that draw may be set between the two, by
    `apply_token_bitmask`.

    `depth` steps may be launched before the first of them is collected. Two keep a device busy
    whose steps are shorter than the way of a token to the host and of the next step to the device,
    and gain a little where nobody waits for single tokens.
    """

    def __init__(
        self,
        programs: Programs,
        weights: tuple[Array, ...],
        kv: KVCache,
        eos_ids: list[int],
        compiles: CompileCounter,
    ):
        self.programs, self.weights, self.kv, self.eos_ids, self.compiles = (
            programs,
            weights,
            kv,
            eos_ids,
            compiles,
        )
        self.slots = programs.slots
        self.depth = 1
        # Of each decode bucket and extend shape without context, found in warm-up
        self.seconds: dict[object, float] = {}
        self.link: Link | None = None  # to host memory, likewise
        self._traffic = Traffic()
        self._fresh()

    @property
    def traffic(self) -> Traffic:
        """Pages that have travelled between the pool and host memory."""
        return self._traffic if self.swapper is None else self.swapper.traffic

    def move(self, moves: Moves) -> None:
        """What a plan moves between the pool and host memory; before its forward, if it has one."""
        assert self.swapper is not None, "an engine without host pages moves none"
        self.kv = self.swapper.run(self.kv, moves)

    def forward(self, plan: Plan) -> Forwarded:
        """Start one step. Host work only: pad, upload what changed, dispatch."""
        buckets = self.programs.buckets
        if plan.copies:
            self._copy(plan.copies)
        if plan.chunks:
            tokens = sum(chunk.length for chunk in plan.chunks)
            shape = buckets.fit_extend(tokens, len(plan.chunks), len(plan.decodes))
            self._update_slots(plan, shape)
            forward_output = self._extend(shape)
            rows: Sequence[int] = (
                *range(len(plan.decodes)),
                *range(shape.decodes, shape.decodes + len(plan.chunks)),
            )
        else:
            self._update_slots(plan)
            forward_output = self._decode(buckets.fit_decode(len(plan.decodes)))
            rows = range(len(plan.decodes))
        kinds = frozenset(
            {r.needs for r in plan.decodes} | {c.request.needs for c in plan.chunks if c.final}
        )
        for chunk in plan.chunks if plan.asking else ():
            if chunk.final and chunk.request.asked is not None:
                self.processing.set_slot(chunk.request)
        return Forwarded(plan, rows, forward_output, kinds, self._score(plan))

    def apply_token_bitmask(
        self, requests: Sequence[Request], token_bitmask: Fill
    ) -> list[tuple[Request, str]]:
        """Which tokens these requests may say next, and why some cannot go on."""
        return self.processing.apply_token_bitmask(requests, token_bitmask)

    def draw(self, forwarded: Forwarded) -> StepResult:
        """Draw the tokens of a step. Host work only."""
        plan, forward_output, kinds = forwarded.plan, forwarded.forward_output, forwarded.kinds
        logits, failures = forward_output.logits, dict[int, str]()
        if plan.asking:
            logits = self.processing.run(forward_output, self.state)
            if functions := _functions(forwarded):
                logits, failures = self.processing.replace(functions, logits)
        token = self._sample(logits, forward_output, self.programs.sampler(sampler_of(kinds)))
        begin_read(token)
        if failures:
            failures = {
                index: failures[row] for index, row in enumerate(forwarded.rows) if row in failures
            }
        if not any(kind & LOGPROBS for kind in kinds):
            return StepResult(
                plan, forwarded.rows, token, None, scored=forwarded.scored, failures=failures
            )
        top = max([request.top for request in plan.emitters if request is not None])
        packed = self._logprobs(
            logits, forward_output, next(width for width in self.programs.widths if width >= top)
        )
        begin_read(packed)
        return StepResult(plan, forwarded.rows, token, packed, forwarded.scored, failures)

    def collect(self, result: StepResult) -> Collected:
        """Wait for a step's tokens."""
        rows = slice(len(result.rows)) if isinstance(result.rows, range) else list(result.rows)
        tokens = read(result.token)[rows].tolist()
        scores = result.scored.collect() if result.scored is not None else []
        logprobs = StepLogprobs(read(result.packed)[rows]) if result.packed is not None else None
        return Collected(result.plan, tokens, logprobs, scores, result.failures)

    def warm_up(self, deep: bool = False) -> None:
        """Run every program on padding rows, which touch the trash slot and no page: once as it is,
        once to record it, once to time it. Sets `seconds` and `depth`; `deep` asks for two steps in
        flight whatever they take."""
        empty = Plan(decodes=(), positions=(), chunks=())
        self._update_slots(empty, force=True)
        for pairs in self.programs.buckets.copies:
            for _ in range(RECORDING_RUNS):
                self._copy(((0, DROP_PAGE, 0),) * pairs)
        for _ in range(RECORDING_RUNS):
            self.processing.warm_up()
        if self.swapper is not None:
            self.kv, self.link = self.swapper.warm_up(self.kv)
        for shape in self.programs.buckets.extend:
            self._update_slots(empty, shape)
            self.seconds[shape] = self._warm_up(functools.partial(self._extend, shape))
        for rows in self.programs.buckets.decode:
            self.seconds[rows] = self._warm_up(functools.partial(self._decode, rows))
        for forward_output in self._forward_outputs.values():
            for width in self.programs.widths * RECORDING_RUNS:
                read(self._logprobs(forward_output.logits, forward_output, width))
        for width in self.programs.widths * RECORDING_RUNS:
            read(self._score_block(np.zeros((2, self.programs.buckets.score), np.int32), width))
        accelerator = self.programs.model.mesh.devices.flat[0].platform != "cpu"
        self.depth = (
            MAX_DEPTH if accelerator and (deep or min(self.seconds.values()) < SHORT_STEP) else 1
        )

    def reset(self) -> None:
        """After a step that failed: slot state and pages anew, since donated buffers may be gone
        and pages half written."""
        for buffer in jax.tree.leaves(
            (self.kv, self._forward_outputs, self._states, self.processing.buffers)
        ):
            buffer.delete()  # first: a device has no room for two pools
        self.kv = zeros_of(self.programs.abstract.kv)
        self._fresh()

    def _fresh(self) -> None:
        # Uplinks too: steps that nobody will collect may still read the buffers of the last ones.
        programs = self.programs
        self._uplinks = {
            chunks: HostBuffers(programs.upload_size(chunks), programs.host, MAX_DEPTH + 2)
            for chunks in (False, True)
        }
        sizes = programs.buckets.copies
        rounds = -(-self.slots // sizes[-1])  # at most, in one step
        self._copy_uplinks = {
            n: HostBuffers(2 * n * programs.kinds, programs.host, rounds * (MAX_DEPTH + 2))
            for n in sizes
        }
        self.state: SlotState = place(
            SlotState.zeros(self.slots, self.programs.table_width), self.programs.state
        )
        self._staged = place(np.zeros(self.programs.staged.shape, np.int32), self.programs.staged)
        self._forward_outputs: dict[int, ForwardOutput] = {}
        self._states: Array = zeros_of(programs.states)
        blocks = -(-programs.buckets.max_tokens // programs.buckets.score)
        self._asked = HostBuffers(
            2 * programs.buckets.score, programs.host, blocks * (MAX_DEPTH + 2)
        )
        self._slots_on_device: tuple[int, ...] = ()  # of the decode rows
        self.processing = LogitsProcessing(programs)
        self.swapper = PageSwapper(programs, self._traffic) if programs.moved else None

    def _warm_up(self, forward: Callable[[], ForwardOutput]) -> float:
        """Seconds that a forward takes once recorded."""
        for _ in range(RECORDING_RUNS):
            start = time.perf_counter()
            forward_output = jax.block_until_ready(forward())
            seconds = time.perf_counter() - start
        logits = self.processing.run(forward_output, self.state)
        for sampler in self.programs.samplers:
            read(self._sample(logits, forward_output, sampler))
        return seconds

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy pages in order, as many at a time as a program takes; what is left of its room
        copies nowhere."""
        sizes, of_kind = (
            self.programs.buckets.copies,
            [[pair[:2] for pair in copies if pair[2] == k] for k in range(self.programs.kinds)],
        )
        for start in range(0, max(map(len, of_kind)), sizes[-1]):
            batches = [pairs[start : start + sizes[-1]] for pairs in of_kind]
            size = next(n for n in sizes if n >= max(map(len, batches)))
            rows = np.zeros((self.programs.kinds, 2, size), np.int32)
            rows[:, 1] = DROP_PAGE
            for row, batch in zip(rows, batches, strict=True):
                row[:, : len(batch)] = np.array(batch, np.int32).reshape(-1, 2).T
            buffer = self._copy_uplinks[size].send([rows.reshape(-1)])
            self.kv = self.programs.get("copy", size)(self.kv, buffer)

    def _decode(self, rows: int) -> ForwardOutput:
        logit_rows = self.programs.buckets.logit_rows(rows)
        program, reused = self.programs.get("decode", rows), self._reused(logit_rows)
        self.kv, self._forward_outputs[logit_rows] = program(
            self.weights, self.kv, self.state, reused
        )
        return self._forward_outputs[logit_rows]

    def _extend(self, shape: ExtendShape) -> ForwardOutput:
        rows = self.programs.buckets.logit_rows(shape)
        program, reused = self.programs.get("extend", shape), self._reused(rows)
        found = program(self.weights, self.kv, self.state, self._staged, reused, self._states)
        self.kv, self.state, self._forward_outputs[rows], self._states = found
        return self._forward_outputs[rows]

    def _reused(self, rows: int) -> ForwardOutput:
        """The buffers that every forward with so many rows of logits writes into."""
        if rows not in self._forward_outputs:
            self._forward_outputs[rows] = zeros_of(self.programs.forward_output(rows))
        return self._forward_outputs[rows]

    def _sample(self, logits: Array, forward_output: ForwardOutput, sampler: Sampler) -> Array:
        program = self.programs.get("sample", (forward_output.slots.shape[0], sampler))
        progress, token = program(logits, forward_output, self.state.progress, self.state.asks)
        self.state = replace(self.state, progress=progress)
        return token

    def _score(self, plan: Plan) -> PromptScores | None:
        """Start scoring what the plan's chunks computed of prompts whose log-probabilities are
        wanted."""
        todo = spans(plan)
        if not todo:
            return None
        top = max(span.request.params.prompt_logprobs or 0 for span in todo)
        width = next(width for width in self.programs.widths if width >= top)
        asked, size = asked_of(todo), self.programs.buckets.score
        blocks = [
            self._score_block(asked[:, at : at + size], width)
            for at in range(0, asked.shape[1], size)
        ]
        for block in blocks:
            begin_read(block)
        return PromptScores(todo, blocks)

    def _score_block(self, asked: np.ndarray, width: int) -> Array:
        padded = np.pad(asked, ((0, 0), (0, self.programs.buckets.score - asked.shape[1])))
        return self.programs.get("score", (self.programs.buckets.score, width))(
            self.weights, self._states, self._asked.send([padded.reshape(-1)])
        )

    def _logprobs(self, logits: Array, forward_output: ForwardOutput, width: int) -> Array:
        """Log-probabilities of the tokens that were just drawn from `logits`."""
        wanted = (
            logits if self.programs.scoring.mode.startswith("processed") else forward_output.logits
        )
        return self.programs.get("logprobs", (forward_output.slots.shape[0], width))(
            wanted, forward_output, self.state
        )

    def _update_slots(
        self, plan: Plan, shape: ExtendShape | None = None, force: bool = False
    ) -> None:
        """Upload the row map, new pages and, for `shape`, the plan's chunks. Skipped in steady
        decode: same rows, no new page."""
        slots = plan.slots
        if shape is None and not (force or plan.table_writes or slots != self._slots_on_device):
            return
        shapes, width = (
            self.programs.update_shapes,
            self.programs.table_width // self.programs.kinds,
        )
        parts = [pack(update_arrays(plan, shapes, width), shapes)]
        if shape is not None:
            parts.append(self.programs.layout(shape).pack(plan.chunks, self.slots, self.eos_ids))
        with_chunks = shape is not None
        buffer = self._uplinks[with_chunks].send(parts)
        program, taken = (
            self.programs.get("update_slots", with_chunks),
            (self.state.table, self.state.rows, buffer),
        )
        if with_chunks:
            table, slot_of_row, self._staged = program(*taken, self._staged)
        else:
            table, slot_of_row = program(*taken)
        self.state = replace(self.state, table=table, rows=slot_of_row)
        self._slots_on_device = slots


def _functions(forwarded: Forwarded) -> dict[int, Callable[[np.ndarray], np.ndarray]]:
    """Per row of logits what its request's functions on the host make of it, one after another."""
    found: dict[int, Callable[[np.ndarray], np.ndarray]] = {}
    for row, request in zip(forwarded.rows, forwarded.plan.emitters, strict=True):
        if (
            request is not None
            and request.status is Status.RUNNING
            and request.asked is not None
            and request.asked.functions
        ):
            found[row] = functools.partial(
                run_host_processors, request.asked.functions, list(request.output)
            )
    return found
