"""Prompts whose log-probabilities are wanted: what to score of a step, and the scores on their way
back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jax import Array

from jaxllm.engine.runtime.host_buffers import read
from jaxllm.engine.scheduling.plan import Span


def asked_of(todo: list[Span]) -> np.ndarray:
    """int32 `[2, rows]`: of every position to be scored, the row of its state and the token that
    follows it."""
    rows = [np.arange(span.row, span.row + span.stop - span.start) for span in todo]
    tokens = [np.array(span.request.prompt[span.start + 1 : span.stop + 1]) for span in todo]
    return np.stack([np.concatenate(rows), np.concatenate(tokens)]).astype(np.int32)


@dataclass(frozen=True)
class PromptScores:
    """Scores of prompt positions that are still on the device, in blocks of equal size."""

    todo: list[Span]
    blocks: list[Array]

    def collect(self) -> list[tuple[Span, np.ndarray]]:
        """Wait for them; each span's rows in their packed form."""
        rows = np.concatenate([read(block) for block in self.blocks])
        ends = np.cumsum([span.stop - span.start for span in self.todo])
        return [
            (span, rows[end - (span.stop - span.start) : end])
            for span, end in zip(self.todo, ends, strict=True)
        ]
