"""The device side of `process`: what requests asked of it, what they have said, and the buffers it
writes into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import batched

import jax
import numpy as np
from jax import Array

from jaxllm.cache.kv import zeros_of
from jaxllm.engine.constraints.host_processors import HostProcessorError
from jaxllm.engine.runtime.batch import pack, packed_size, views
from jaxllm.engine.runtime.host_buffers import HostBuffers
from jaxllm.engine.runtime.programs import Programs
from jaxllm.engine.runtime.state import SlotState
from jaxllm.engine.runtime.step import ForwardOutput
from jaxllm.engine.scheduling.request import Request
from jaxllm.sampling.bits import packed
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.processor_arguments import custom_of

type Fill = Callable[[Sequence[Request], np.ndarray], list[tuple[int, str]]]

SEATS, MASK_SENDS = 64, 8  # buffers that may wait for the device; more make the host wait


class LogitsProcessing:
    """Made at start and again after a failure. Memory is bounded: rows are of slots, whoever sits
    in them."""

    def __init__(self, programs: Programs):
        self._programs = programs
        self._counts: Array = zeros_of(programs.counts)
        self._terms = zeros_of(programs.terms)
        self._logits: dict[int, Array] = {}
        self._seats = HostBuffers(packed_size(programs.seat_shapes), programs.host, SEATS)
        self._masks = HostBuffers(packed_size(programs.mask_shapes), programs.host, MASK_SENDS)

    @property
    def buffers(self) -> list[Array]:
        """Everything on the device."""
        return jax.tree.leaves((self._counts, self._terms, self._logits))

    def set_slot(self, request: Request) -> None:
        """Before the first draw of a request in its slot, newly come or back from preemption: what
        it asks, its prompt and its output."""
        assert request.asked is not None
        shapes = self._programs.seat_shapes
        arrays = self._row_of(request.params, request.prompt)
        arrays["slot"], arrays["allowed"] = (
            np.array([request.slot], np.int32),
            request.asked.allowed_W,
        )
        room = shapes["said"][0][0]
        for first in range(0, max(1, len(request.output)), room):
            said = request.output[first : first + room]
            arrays["first"] = np.array([first == 0], np.int32)
            arrays["said"] = np.pad(
                np.array(said, np.int32),
                (0, room - len(said)),
                constant_values=self._programs.abstract.vocab_size,
            )
            self._send_seat(arrays)

    def apply_token_bitmask(
        self, requests: Sequence[Request], token_bitmask: Fill
    ) -> list[tuple[Request, str]]:
        """Which tokens may be said next, in place of what was allowed before: `token_bitmask(some
        of them, allowed_RW)` writes them where the device reads them, as packed bits, and says of
        which rows and why there are none. Those are given back with the reason, and keep what they
        had."""
        failures: list[tuple[Request, str]] = []
        (rows,) = self._programs.mask_shapes["slot"][0]

        def write(some: Sequence[Request], buffer: np.ndarray) -> None:
            places = views(buffer, self._programs.mask_shapes)
            # Nobody's: what the buffer holds for it goes nowhere
            places["slot"][len(some) :] = self._programs.slots + 1
            places["slot"][: len(some)] = [request.slot for request in some]
            for row, why in token_bitmask(some, places["allowed"]):
                places["slot"][row] = self._programs.slots + 1
                failures.append((some[row], why))

        for some in batched(requests, rows):
            buffer = self._masks.write(partial(write, some))
            self._terms, taken = self._programs.get("apply_token_bitmask", 0)(self._terms, buffer)
            self._masks.until(taken)
        return failures

    def run(self, forward_output: ForwardOutput, state: SlotState) -> Array:
        """The logits to draw from. To be called in every step in which a seated request emits,
        after its forward."""
        rows = forward_output.slots.shape[0]
        if rows not in self._logits:
            self._logits[rows] = zeros_of(self._programs.forward_output(rows).logits)
        program = self._programs.get("process", rows)
        self._counts, self._logits[rows] = program(
            forward_output, state, self._counts, self._terms, self._logits[rows]
        )
        return self._logits[rows]

    def replace(
        self, rows: Mapping[int, Callable[[np.ndarray], np.ndarray]], logits: Array
    ) -> tuple[Array, dict[int, str]]:
        """The logits with some rows `[V]` as functions make them on the host, and why rows failed,
        which hold NaN then. Slow: all logits of the step travel to the host and back."""
        values, failures = np.array(logits), {}
        for row, function in rows.items():
            try:
                values[row] = function(values[row])
            except HostProcessorError as error:
                values[row], failures[row] = np.nan, str(error)
        self._logits[logits.shape[0]] = jax.device_put(values, logits.sharding)
        return self._logits[logits.shape[0]], failures

    def warm_up(self) -> None:
        """Run what takes rows from the host, on the trash slot."""
        shapes = self._programs.seat_shapes
        trash = np.array([self._programs.slots], np.int32)
        arrays = self._row_of(SamplingParams(), []) | {"slot": trash, "first": np.ones(1, np.int32)}
        arrays |= {name: np.zeros(shapes[name][0], np.int32) for name in ("said", "allowed")}
        self._send_seat(arrays)
        self._terms, taken = self._programs.get("apply_token_bitmask", 0)(
            self._terms, self._masks.write(self._nobody)
        )
        self._masks.until(taken)

    def _nobody(self, buffer: np.ndarray) -> None:
        """Masks for no slot."""
        buffer[:] = 0
        views(buffer, self._programs.mask_shapes)["slot"][:] = self._programs.slots + 1

    def _send_seat(self, arrays: dict[str, np.ndarray]) -> None:
        buffer = self._seats.send([pack(arrays, self._programs.seat_shapes)])
        self._counts, self._terms, taken = self._programs.get("set_slot", 0)(
            self._counts, self._terms, buffer
        )
        self._seats.until(taken)

    def _row_of(self, params: SamplingParams, prompt: Sequence[int]) -> dict[str, np.ndarray]:
        """The arrays of `sampling.process.LogitsParams` for one slot, but for `allowed`."""
        (most,), vocab_size = (
            self._programs.seat_shapes["bias_ids"][0],
            self._programs.abstract.vocab_size,
        )
        biases = params.logit_bias or {}
        ids = np.arange(vocab_size, vocab_size + most, dtype=np.int32)
        ids[: len(biases)] = list(biases)
        values = np.zeros(most, np.float32)
        values[: len(biases)] = list(biases.values())
        penalties = np.array(
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty],
            np.float32,
        )
        enabled = [name for name in params.logits_processors or () if isinstance(name, str)]
        custom = custom_of(self._programs.model.processors, enabled, params.extra_args or {})
        # Nothing else looks at the prompt
        read = prompt if enabled or params.repetition_penalty != 1 else []
        return {
            "penalties": penalties,
            "bias_ids": ids,
            "biases": values,
            "prompt": packed(read, vocab_size),
            "custom": custom,
        }
