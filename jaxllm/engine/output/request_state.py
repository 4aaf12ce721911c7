"""A request while it runs: its choices and its prompt's log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxllm.engine.output.detok import Detokenizer
from jaxllm.engine.scheduling.plan import Span
from jaxllm.engine.scheduling.request import Request
from jaxllm.logprobs import trimmed
from jaxllm.messages import PromptLogprobs


@dataclass(slots=True)
class RequestState:
    """A request's choices, their text, and the log-probabilities of their prompt."""

    choices: list[Request] = field(default_factory=list)
    detokenizers: list[Detokenizer | None] = field(default_factory=list)  # one per choice
    # Of the prompt, as far as they have come
    scores: list[np.ndarray] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None  # once all have
    told: set[int] = field(default_factory=set)  # the choices that have told them

    def score(self, span: Span, scores: np.ndarray) -> None:
        """Keep a part of the prompt's log-probabilities; they come in the order of positions."""
        request = span.request
        top = request.params.prompt_logprobs or 0
        self.scores.append(trimmed(scores, top))
        if span.stop == request.score_end:
            self.prompt_logprobs = PromptLogprobs(
                top=top, packed=b"".join(part.tobytes() for part in self.scores)
            )
            self.scores.clear()

    def scores_for(self, index: int) -> PromptLogprobs | None:
        """The prompt's log-probabilities, once they are there, for one delta of a choice: the first
        that asks."""
        if self.prompt_logprobs is None or index in self.told:
            return None
        self.told.add(index)
        return self.prompt_logprobs
