"""From a client's request to its scheduled choices, and its state on the output side. Imports no
jax."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from jaxllm.config import Resolved
from jaxllm.engine.constraints.validation import LogitsOptionsReader
from jaxllm.engine.output.detok import Detokenizer
from jaxllm.engine.scheduling.plan import Span
from jaxllm.engine.scheduling.request import PromptSharing, Request, Status
from jaxllm.logprobs import trimmed
from jaxllm.messages import GenerateRequest, PromptLogprobs
from jaxllm.sampling.choose import needs
from jaxllm.tokenizer import Tokenizer


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

    def undelivered(self, ranked: bool) -> list[tuple[str, int]]:
        """(request id, choice index) of every choice whose end the client has not got; of `ranked`
        choices it gets only the best `n`."""
        first = self.choices[0]
        if ranked:
            return [(first.id, index) for index in range(first.params.n)]
        return [(first.id, c.index) for c in self.choices if c.status is not Status.FINISHED]


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index`: the request's own for the first, unrelated 64-bit values for the
    others."""
    if index == 0:
        return seed
    digest = hashlib.sha256(
        b"jaxllm choice" + seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    ).digest()
    return int.from_bytes(digest[:8], "little")


class RequestFactory:
    """Makes the choices of requests, which nothing else knows yet. `seed` decides the draws of
    requests without a seed of their own."""

    def __init__(
        self,
        resolved: Resolved,
        tokenizer: Tokenizer | None,
        options: LogitsOptionsReader,
        eos_ids: frozenset[int],
        seed: int,
    ):
        self._max_model_len, self._tokenizer = resolved.max_model_len, tokenizer
        self._options, self._eos_ids = options, eos_ids
        self._seeds = np.random.Generator(np.random.Philox(seed))

    def make_state(self, request: GenerateRequest) -> RequestState:
        """The state of a validated request: one `Request` per choice; of a beam search the one that
        its beams start from."""
        params, prompt = request.params, request.prompt_token_ids
        limit = self._max_model_len - len(prompt)
        eos_ids = frozenset[int]() if params.ignore_eos else self._eos_ids
        seed = params.seed
        if seed is None:
            seed = int(self._seeds.integers(2**64, dtype=np.uint64))
        state = RequestState()
        sharing = PromptSharing(state.choices) if params.samples > 1 else None
        for index in range(1 if params.use_beam_search else params.samples):
            scores = params.prompt_logprobs is not None and index == 0
            choice = Request(
                id=request.id,
                index=index,
                prompt=prompt,
                params=params,
                seed=choice_seed(seed % 2**64, index),
                arrival=request.arrival,
                max_tokens=min(params.max_tokens or limit, limit),
                cache_salt=request.cache_salt,
                needs=needs(params),
                top=params.logprobs or 0,
                logits_options=self._options.read_options(params),
                score_end=len(prompt) - 1 if scores else 0,
                stops=frozenset(params.stop_token_ids or ()) | eos_ids,
                sharing=sharing,
            )
            state.choices.append(choice)
            state.detokenizers.append(self.make_detokenizer(choice))
        if params.prompt_logprobs is not None and len(prompt) == 1:
            state.prompt_logprobs = PromptLogprobs(top=params.prompt_logprobs, packed=b"")
        return state

    def make_detokenizer(self, choice: Request) -> Detokenizer | None:
        """Makes a choice's text; None when it has none."""
        if self._tokenizer is None or not choice.params.detokenize:
            return None
        return Detokenizer(self._tokenizer.backend, choice.prompt, choice.params)
