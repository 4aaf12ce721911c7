"""Launches the plans of a generating model and collects their tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import batched
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from jaxllm.cache.arrays import DROP_PAGE, KVCache
from jaxllm.cache.transfer import Page
from jaxllm.engine.constraints.token_masks import HostProcessorError, run_host_processors
from jaxllm.engine.runtime.dispatch import RECORDING_RUNS, Dispatcher, StagesBefore
from jaxllm.engine.runtime.lattice import Programs, forward_key
from jaxllm.engine.runtime.launch import Launch, read
from jaxllm.engine.runtime.program import MAX_DEPTH, STATE, Key, Resident
from jaxllm.engine.runtime.programs.move_pages import pack_copies
from jaxllm.engine.runtime.programs.process_logits import (
    BITMASK_ROWS,
    Fill,
    pack_bitmask,
    pack_slot,
    slot_layout,
)
from jaxllm.engine.runtime.programs.prompt_logprobs import PromptScores, pack_scores
from jaxllm.engine.runtime.programs.update_slots import SlotUpdate
from jaxllm.engine.runtime.state import SlotState
from jaxllm.engine.scheduling.buckets import ExtendShape
from jaxllm.engine.scheduling.kv_offload import Link
from jaxllm.engine.scheduling.plan import Plan, Span, spans
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.logprobs import StepLogprobs
from jaxllm.sampling.choose import LOGPROBS, sampler_of

SHORT_STEP = 2e-3  # seconds; below it one step in flight does not keep the device busy


class Forwarded(NamedTuple):
    """A step whose forward was launched and whose sampling was not.

    Attributes:
        plan: the step.
        rows: row of logits of each decode, then of each chunk.
        logit_rows: rows of logits, padding included.
        needs: the different `Request.needs` of the rows that sample.
        scored: log-probabilities of prompts, if any are wanted.
    """

    plan: Plan
    rows: Sequence[int]
    logit_rows: int
    needs: frozenset[int]
    scored: PromptScores | None


class UnusedDraw(NamedTuple):
    """Why nothing of what a step draws for a request is used.

    Attributes:
        dead_end: why the request has no next token, which ends it. None where its next tokens were
            forced, and so appended without a draw.
    """

    dead_end: str | None = None


type UnusedDraws = Mapping[Request, UnusedDraw]

ALL_USED: UnusedDraws = MappingProxyType({})


class StepResult(NamedTuple):
    """A step in flight, with its results still on the device.

    Attributes:
        forwarded: the step.
        token: [Q] tokens, or [Q, n] where decodes have up to n inputs.
        packed: log-probabilities, if a request wants them.
        failures: why a row has no token, by its index in `forwarded.rows`.
        unused: requests whose draw is not used.
    """

    forwarded: Forwarded
    token: Array
    packed: Array | None
    failures: dict[int, str]
    unused: UnusedDraws

    @property
    def group(self) -> int:
        """Of the slots that run."""
        return self.forwarded.plan.group


class Collected(NamedTuple):
    """A finished step on the host.

    Attributes:
        plan: the step.
        tokens: of each decode and chunk: those that it gives, none of a chunk that is not its
            prompt's last, nor of a row that has ended or whose logits are not finite.
        logprobs: of these tokens.
        scores: packed log-probabilities of prompts.
        failures: why a row has no token, where more is known.
        unused: requests whose tokens are not used.
    """

    plan: Plan
    tokens: list[list[int]]
    logprobs: StepLogprobs | None
    scores: list[tuple[Span, np.ndarray]]
    failures: dict[int, str]
    unused: UnusedDraws = ALL_USED


class Runner(Dispatcher):
    """`forward(plan)` and `draw(forwarded) -> StepResult` never wait for the device;
    `collect(result)` does. `apply_token_bitmask` may come between the two.

    `depth` steps may be launched before the first of them is collected. Two keep a device busy
    whose steps are shorter than the round trip from one token to the next launch. They gain a
    little for long steps too, where no request streams.
    """

    def __init__(
        self,
        programs: Programs,
        weights: tuple[Array, ...],
        kv: KVCache,
        before: StagesBefore | None = None,
    ):
        super().__init__(programs, weights, kv, before)
        self._samplers: dict[tuple[int, frozenset[int]], Key]
        self._updates: dict[ExtendShape | None, SlotUpdate] = {}
        self.slots = self.shapes.slots
        self._tells = self.shapes.stage.count > 1  # other stages of what it draws
        self.depth = 1
        # Of each decode bucket and extend shape without context, measured in warm-up
        self.seconds: dict[object, float] = {}
        self.link: Link | None = None  # to host memory, measured in warm-up
        self.take_made()
        self._start_empty(kv)

    def take_made(self) -> None:
        """Use the shapes and samplers that are there from now on; more come with late programs.
        Another thread may call it while steps run."""
        self._missing = missing = self.programs.missing
        best = self.shapes.samplers[-1]
        buckets = self.shapes.buckets
        self._fitting = buckets.restricted(
            lambda shape: (
                forward_key(shape) not in missing
                and Key("sample", (buckets.logit_rows(shape), best)) not in missing
            )
        )
        self._samplers = {}

    @property
    def state(self) -> SlotState:
        """The slot state."""
        return self._device.read(STATE)

    def take_out(self, pages: Sequence[int]) -> list[Page]:
        """Copies of pages as they are behind all launched steps, on their way to host memory."""
        assert self.swapper is not None, "an engine without host pages moves none"
        self.kv, taken = self.swapper.take_out(self.kv, pages)
        return taken

    def forward(self, plan: Plan) -> Forwarded:
        """Start a step. Host work only: pack, upload what changed, dispatch. With stages on other
        hosts it waits for the group's step before."""
        self.before.catch_up(plan.group)
        shape = self._fit(plan)
        results = self.run(self.pack(plan, shape))
        if isinstance(shape, ExtendShape):
            closes_gaps = self.shapes.buckets.closes_gaps(shape)
            if closes_gaps:
                first = len(plan.decodes)
            else:
                first = shape.decodes
            rows: Sequence[int] = (
                *range(len(plan.decodes)),
                *range(first, first + len(plan.chunks)),
            )
        else:
            rows = range(len(plan.decodes))
        needs = frozenset({request.needs for request in plan.emitters if request is not None})
        scored = None
        if results:
            scored = PromptScores(spans(plan), results)
        return Forwarded(plan, rows, self.shapes.buckets.logit_rows(shape), needs, scored)

    def apply_token_bitmask(
        self, requests: Sequence[Request], token_bitmask: Fill
    ) -> list[tuple[Request, str]]:
        """Replace the allowed tokens of these requests. Returns requests that have none, with the
        reason; see `pack_bitmask`."""
        failures = []
        key = Key("apply_token_bitmask")
        for some in batched(requests, BITMASK_ROWS):
            buffer = self._buffers[key].lease()
            failures += pack_bitmask(buffer, some, token_bitmask, self.shapes)
            self.run(Launch(((key, buffer),)))
        return failures

    def draw(self, forwarded: Forwarded, unused: UnusedDraws = ALL_USED) -> StepResult:
        """Sample the tokens of a step, of which those of the `unused` are not used. Host work
        only."""
        plan = forwarded.plan
        n = forwarded.logit_rows
        failures: dict[int, str] = {}
        calls: list[tuple[Key, None]] = []
        if plan.processed_requests:
            calls.append((Key("process_logits", (n,)), None))
            if rewritten := _rewritten_rows(forwarded):
                self.run(Launch(tuple(calls)))
                failures = self._rewrite_logits(n, rewritten)
                calls = []
        calls.append((self._sample_key(n, forwarded.needs), None))
        if max(forwarded.needs, default=0) >= LOGPROBS:
            top = max([request.top for request in plan.emitters if request is not None])
            calls.append((Key("logprobs", (n, self.shapes.width(top))), None))
        token, *packed = self.run(Launch(tuple(calls)))
        if self._tells:
            self.before.drawn(plan.group, self._device.read(Resident("drawn", n)))
        return StepResult(forwarded, token, packed[0] if packed else None, failures, unused)

    def collect(self, result: StepResult) -> Collected:
        """Wait for a step's tokens. Raises PeerTimeout when a device was not heard."""
        plan = result.forwarded.plan
        rows = result.forwarded.rows
        scored = result.forwarded.scored
        places = slice(len(rows)) if isinstance(rows, range) else list(rows)
        tokens = token_rows(read(result.token)[places])
        self.check_peers()
        if scored is not None:
            scores = scored.collect()
        else:
            scores = []
        logprobs = None
        if result.packed is not None:
            logprobs = StepLogprobs(read(result.packed)[places])
        return Collected(plan, tokens, logprobs, scores, result.failures, result.unused)

    def pack(self, plan: Plan, shape: int | ExtendShape) -> Launch:
        """The launch of a plan's forward in a compiled shape that holds it."""
        calls: list[tuple[Key, np.ndarray | None]] = [*self.before.news(plan.group)]
        if plan.copies:
            calls += pack_copies(plan.copies, self.shapes)
        if isinstance(shape, ExtendShape):
            calls.append(self.pack_slots(plan, shape))
            for chunk in plan.chunks:
                if chunk.final and chunk.request.logits_options is not None:
                    buffers = pack_slot(chunk.request, self.shapes)
                    calls += [(Key("set_slot"), buffer) for buffer in buffers]
            calls += pack_scores(spans(plan), self.shapes)
        else:
            # Skipped in steady decode: same rows, no new page
            if plan.table_writes or plan.slots != self._packed_slots:
                calls.append(self.pack_slots(plan))
            calls.append((forward_key(shape), None))
        return Launch(tuple(calls))

    def warm_up(self, deep: bool = False) -> None:
        """Run every program that is there on padding rows, which use the trash slot and no page:
        once to load it, once to record it, once to time it. Sets `seconds` and `depth`; `deep` asks
        for two steps in flight however long they take."""
        empty = Plan(decodes=(), chunks=())
        buckets = self._fitting
        self.run(Launch((self.pack_slots(empty),)))
        for pairs in buckets.copies:
            copies = pack_copies(((0, DROP_PAGE, 0),) * pairs, self.shapes)
            self.run(Launch(tuple(copies * RECORDING_RUNS)))
        if not self._missing:
            self._warm_up_slots()
        links = self.before.warm_up()
        if self.swapper is not None:
            self.kv, link = self.swapper.warm_up(self.kv)
            # Stages move pages at the same time
            self.link = max([link, *links], key=lambda link: link.seconds(link.width))
        for shape in buckets.extend:
            self.seconds[shape] = self._warm_up(shape, self.pack_slots(empty, shape))
        for rows in buckets.decode:
            self.seconds[rows] = self._warm_up(rows, (forward_key(rows), None))
        if not self._missing:
            self._warm_up_logprobs()
        self._estimate_seconds()
        self.expect_peers()
        # A group of a pipeline has one step in flight while its next one is planned
        alone = self.shapes.platform != "cpu" and not self._tells
        short = min(self.seconds.values()) < SHORT_STEP
        if alone and (deep or short):
            self.depth = MAX_DEPTH
        else:
            self.depth = 1

    def _warm_up_slots(self) -> None:
        """`warm_up` of what requests ask of their slots' logits."""
        layout = slot_layout(self.shapes.logits_params)
        bitmask = Key("apply_token_bitmask")
        trash = np.zeros(layout.size, np.int32)
        layout.views(trash)["slot"][:] = self.slots
        for _ in range(RECORDING_RUNS):
            self.run(Launch(((Key("set_slot"), trash),)))
            buffer = self._buffers[bitmask].lease()
            pack_bitmask(buffer, (), lambda *_: [], self.shapes)
            self.run(Launch(((bitmask, buffer),)))

    def _warm_up_logprobs(self) -> None:
        """`warm_up` of log-probabilities."""
        buckets = self.shapes.buckets
        for rows in {*map(buckets.logit_rows, buckets.extend + buckets.decode)}:
            for width in self.shapes.widths * RECORDING_RUNS:
                (packed,) = self.call(Key("logprobs", (rows, width)))
                read(packed)
        block = np.zeros(2 * buckets.score, np.int32)
        for width in self.shapes.widths * RECORDING_RUNS:
            key = Key("prompt_logprobs", (buckets.score, width))
            (packed,) = self.run(Launch(((key, block),)))
            read(packed)

    def _estimate_seconds(self) -> None:
        """`seconds` of forwards that are made late: they take as long as their rows do between
        those that were measured."""
        buckets = self.shapes.buckets
        for shapes in (buckets.extend, buckets.decode):
            measured = sorted(
                (forward_rows(shape), self.seconds[shape])
                for shape in shapes
                if shape in self.seconds
            )
            rows, took = zip(*measured, strict=True)
            for shape in shapes:
                estimate = float(np.interp(forward_rows(shape), rows, took))
                self.seconds.setdefault(shape, estimate)

    def _warm_up(self, shape: int | ExtendShape, forward: tuple[Key, np.ndarray | None]) -> float:
        """Seconds of a forward once recorded; runs the programs that follow it too."""
        rows = self.shapes.buckets.logit_rows(shape)
        for _ in range(RECORDING_RUNS):
            start = time.perf_counter()
            self.run(Launch((forward,)))
            jax.block_until_ready(self._device.read(Resident("forward_output", rows)))
            seconds = time.perf_counter() - start
        if not self._missing:
            self.call(Key("process_logits", (rows,)))
        for sampler in self.shapes.samplers:
            if (key := Key("sample", (rows, sampler))) not in self._missing:
                (token,) = self.call(key)
                read(token)
        return seconds

    def _start_empty(self, kv: KVCache) -> None:
        super()._start_empty(kv)
        self._packed_slots: tuple[int, ...] = ()  # of the decode rows

    def _fit(self, plan: Plan) -> int | ExtendShape:
        """The compiled shape for a plan: decode rows, or an extend shape."""
        buckets = self._fitting
        if not plan.chunks:
            return buckets.fit_decode(len(plan.decodes))
        tokens = sum(chunk.length for chunk in plan.chunks)
        return buckets.fit_extend(tokens, len(plan.chunks), len(plan.decodes))

    def pack_slots(self, plan: Plan, shape: ExtendShape | None = None) -> tuple[Key, np.ndarray]:
        """The upload of row map and page-table entries, or the forward of `shape` that brings them
        and the plan's chunks."""
        update = self._updates.get(shape)
        if update is None:
            layout = None
            if shape is not None:
                layout = self.shapes.chunk_layouts[shape]
            update = self._updates[shape] = SlotUpdate(self.shapes, layout)
        self._packed_slots = plan.slots
        if shape is None:
            key = Key("update_slots")
        else:
            key = forward_key(shape)
        return key, update.pack(plan)

    def _sample_key(self, rows: int, needs: frozenset[int]) -> Key:
        """The cheapest compiled sampler for requests of these `needs`, of few different sets."""
        # `take_made` sets them the other way round: new samplers never meet what was missing before
        samplers = self._samplers
        missing = self._missing
        if (rows, needs) not in samplers:
            needed = sampler_of(needs)
            keys = [Key("sample", (rows, s)) for s in self.shapes.samplers if s >= needed]
            samplers[rows, needs] = next(key for key in keys if key not in missing)
        return samplers[rows, needs]

    def _rewrite_logits(
        self, logit_rows: int, rewritten: list[tuple[int, int, Request]]
    ) -> dict[int, str]:
        """Change rows of the processed logits by host functions; returns why rows failed, by their
        index in the step. Slow: all logits of the step travel to the host and back."""
        at = Resident("processed_logits", logit_rows)
        logits = self._device.read(at)
        failures = dict[int, str]()
        values = np.array(logits)
        for index, row, request in rewritten:
            assert request.logits_options is not None
            functions = request.logits_options.functions
            output = list(request.output)
            try:
                values[row] = run_host_processors(functions, output, values[row])
            except HostProcessorError as error:
                values[row], failures[index] = np.nan, str(error)
        self._device.write(at, jax.device_put(values, logits.sharding))
        return failures


def forward_rows(shape: int | ExtendShape) -> int:
    """Rows that the forward of a decode bucket or an extend shape computes."""
    if isinstance(shape, ExtendShape):
        return shape.tokens + shape.decodes
    return shape


def token_rows(tokens: np.ndarray) -> list[list[int]]:
    """The tokens of each row of a result: `[Q]`, a token a row, or `[Q, n]`, up to n. Negative
    numbers are none; they stand behind the tokens of a row."""
    tokens_QN = tokens.reshape(len(tokens), -1)
    rows: list[list[int]] = tokens_QN.tolist()
    for row in np.flatnonzero(tokens_QN[:, -1] < 0).tolist():
        rows[row] = [token for token in rows[row] if token >= 0]
    return rows


def _rewritten_rows(forwarded: Forwarded) -> list[tuple[int, int, Request]]:
    """Index in the step, row of logits and request, where a request has functions on the host."""
    rows = zip(forwarded.rows, forwarded.plan.emitters, strict=True)
    return [
        (index, row, request)
        for index, (row, request) in enumerate(rows)
        if request is not None
        and request.status is Status.RUNNING
        and request.logits_options is not None
        and request.logits_options.functions
    ]
