"""What the output side knows of a running request. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxllm.engine.output.detok import Detokenizer
from jaxllm.engine.scheduling.plan import Span
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.logprobs import trimmed
from jaxllm.messages import PromptLogprobs


@dataclass(slots=True)
class RequestState:
    """A request while it runs.

    Attributes:
        choices: its scheduled choices, by index.
        detokenizers: of the choices, None for choices without text.
        parts: packed log-probabilities of the prompt, as far as they are computed.
        prompt_logprobs: all of them, once they are computed.
        delivered: indices of the choices that `prompt_logprobs` were sent with.
    """

    choices: list[Request] = field(default_factory=list)
    detokenizers: list[Detokenizer | None] = field(default_factory=list)
    parts: list[np.ndarray] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    delivered: set[int] = field(default_factory=set)

    def add_prompt_logprobs(self, span: Span, packed: np.ndarray) -> None:
        """Keep a part of the prompt's log-probabilities; parts come in the order of positions."""
        request = span.request
        top = request.params.prompt_logprobs or 0
        self.parts.append(trimmed(packed, top))
        if span.stop == request.score_end:
            self.prompt_logprobs = PromptLogprobs(
                top=top, packed=b"".join(part.tobytes() for part in self.parts)
            )
            self.parts.clear()

    def take_prompt_logprobs(self, index: int) -> PromptLogprobs | None:
        """The prompt's log-probabilities for one delta of a choice: the first after they are
        computed."""
        if self.prompt_logprobs is None or index in self.delivered:
            return None
        self.delivered.add(index)
        return self.prompt_logprobs

    def undelivered(self) -> list[tuple[str, int]]:
        """(request id, choice index) of every choice whose end the client has not got; of ranked
        choices it gets only the best `n`."""
        first = self.choices[0]
        if first.params.ranked:
            return [(first.id, index) for index in range(first.params.n)]
        return [(first.id, c.index) for c in self.choices if c.status is not Status.FINISHED]
