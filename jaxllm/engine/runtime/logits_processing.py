"""Host side of `process_logits`: uploads of slots' parameters and of token bitmasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax import Array

from jaxllm.engine.constraints.token_masks import HostProcessorError
from jaxllm.engine.runtime.programs.apply_token_bitmask import bitmask_layout
from jaxllm.engine.runtime.programs.set_slot import slot_layout
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.scheduling.request import Request
from jaxllm.sampling.bits import packed
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.processor_arguments import custom_of

type Fill = Callable[[Sequence[Request], np.ndarray], list[tuple[int, str]]]


class LogitsProcessing:
    """Packs what `set_slot` and `apply_token_bitmask` take."""

    def __init__(self, shapes: StepShapes):
        self._shapes = shapes
        params = shapes.logits_params
        self._slot_layout = slot_layout(params)
        self._bitmask_layout = bitmask_layout(shapes.slots, params.allowed.shape[1])

    def pack_slot(self, request: Request) -> list[np.ndarray]:
        """Buffers of `set_slot` with a request's parameters, prompt and output. They go before the
        first sampling of a request in its slot, newly admitted or back from preemption."""
        assert request.logits_options is not None
        arrays = self._row_of(request.params, request.prompt)
        arrays["slot"] = np.array([request.slot], np.int32)
        arrays["allowed"] = request.logits_options.allowed_W
        size, buffers = self._slot_layout.shapes["said"][0][0], []
        for first in range(0, max(1, len(request.output)), size):
            said = request.output[first : first + size]
            arrays["first"] = np.array([first == 0], np.int32)
            arrays["said"] = np.pad(
                np.array(said, np.int32),
                (0, size - len(said)),
                constant_values=self._shapes.vocab_size,
            )
            buffers.append(self._slot_layout.pack(arrays))
        return buffers

    @property
    def bitmask_rows(self) -> int:
        """Requests of one call of `apply_token_bitmask`."""
        return self._bitmask_layout.shapes["slot"][0][0]

    def pack_bitmask(
        self, buffer: np.ndarray, requests: Sequence[Request], token_bitmask: Fill
    ) -> list[tuple[Request, str]]:
        """Write the allowed tokens of at most `bitmask_rows` requests into a buffer of
        `apply_token_bitmask`. Returns requests that have none, with the reason; they keep their
        former ones.

        `token_bitmask(requests, allowed_RW)` writes packed bits, and returns rows without tokens,
        with the reason.
        """
        places, failures = self._bitmask_layout.views(buffer), []
        # The slot of unused rows: it does not exist
        places["slot"][len(requests) :] = self._shapes.slots + 1
        places["slot"][: len(requests)] = [request.slot for request in requests]
        for row, why in token_bitmask(requests, places["allowed"]):
            places["slot"][row] = self._shapes.slots + 1
            failures.append((requests[row], why))
        return failures

    def pack_trash_slot(self) -> np.ndarray:
        """A buffer of `set_slot` that sets the trash slot, for warm-up."""
        layout = self._slot_layout
        arrays = self._row_of(SamplingParams(), [])
        arrays |= {"slot": np.array([self._shapes.slots], np.int32), "first": np.ones(1, np.int32)}
        arrays |= {name: np.zeros(layout.shapes[name][0], np.int32) for name in ("said", "allowed")}
        return layout.pack(arrays)

    def rewrite_logits(
        self, rows: Mapping[int, Callable[[np.ndarray], np.ndarray]], logits: Array
    ) -> tuple[Array, dict[int, str]]:
        """The logits with some rows `[V]` changed by host functions, and why rows failed, which
        hold NaN then. Slow: all logits of the step travel to the host and back."""
        values, failures = np.array(logits), {}
        for row, function in rows.items():
            try:
                values[row] = function(values[row])
            except HostProcessorError as error:
                values[row], failures[row] = np.nan, str(error)
        return jax.device_put(values, logits.sharding), failures

    def _row_of(self, params: SamplingParams, prompt: Sequence[int]) -> dict[str, np.ndarray]:
        """The arrays of `sampling.process.LogitsParams` for one slot, except `allowed`."""
        (size,), vocab_size = self._slot_layout.shapes["bias_ids"][0], self._shapes.vocab_size
        biases = params.logit_bias or {}
        ids = np.arange(vocab_size, vocab_size + size, dtype=np.int32)
        ids[: len(biases)] = list(biases)
        values = np.zeros(size, np.float32)
        values[: len(biases)] = list(biases.values())
        penalties = np.array(
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty],
            np.float32,
        )
        enabled = [name for name in params.logits_processors or () if isinstance(name, str)]
        custom = custom_of(self._shapes.model.processors, enabled, params.extra_args or {})
        # Nothing else reads the prompt
        read = prompt if enabled or params.repetition_penalty != 1 else []
        return {
            "penalties": penalties,
            "bias_ids": ids,
            "biases": values,
            "prompt": packed(read, vocab_size),
            "custom": custom,
        }
