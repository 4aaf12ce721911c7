"""Log-probabilities of prompts: what a step computes, and the results on their way back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import Array

from jaxllm.engine.runtime.launch import read
from jaxllm.engine.runtime.program import Key
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.scheduling.plan import Span


def pack_scores(todo: list[Span], shapes: StepShapes) -> list[tuple[Key, np.ndarray]]:
    """Calls of `prompt_logprobs` for these spans, in blocks of one size."""
    if not todo:
        return []
    size = shapes.buckets.score
    width = shapes.width(max(span.request.params.prompt_logprobs or 0 for span in todo))
    wanted = score_rows(todo)
    blocks = [wanted[:, at : at + size] for at in range(0, wanted.shape[1], size)]
    padded = [np.pad(block, ((0, 0), (0, size - block.shape[1]))) for block in blocks]
    return [(Key("prompt_logprobs", (size, width)), block.reshape(-1)) for block in padded]


def score_rows(todo: list[Span]) -> np.ndarray:
    """int32 `[2, rows]`: for every position, the row of its hidden state and the token that follows
    it."""
    rows = [np.arange(span.row, span.row + span.stop - span.start) for span in todo]
    tokens = [np.array(span.request.prompt[span.start + 1 : span.stop + 1]) for span in todo]
    return np.stack([np.concatenate(rows), np.concatenate(tokens)]).astype(np.int32)


@dataclass(frozen=True)
class PromptScores:
    """Packed log-probabilities of prompt positions that are still on the device, in blocks of equal
    size."""

    todo: list[Span]
    blocks: list[Array]

    def collect(self) -> list[tuple[Span, np.ndarray]]:
        """Wait for them; each span with its packed rows."""
        rows = np.concatenate([read(block) for block in self.blocks])
        ends = np.cumsum([span.stop - span.start for span in self.todo])
        return [
            (span, rows[end - (span.stop - span.start) : end])
            for span, end in zip(self.todo, ends, strict=True)
        ]
