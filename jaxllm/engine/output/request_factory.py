"""From a client's request to the choices that are scheduled. Imports no jax."""

from __future__ import annotations

import numpy as np

from jaxllm.config import Resolved
from jaxllm.engine.constraints.logits_options import LogitsOptionsReader
from jaxllm.engine.output.best_of import choice_seed
from jaxllm.engine.output.detok import Detokenizer
from jaxllm.engine.output.request_state import RequestState
from jaxllm.engine.scheduling.request import PromptSharing, Request
from jaxllm.messages import GenerateRequest, PromptLogprobs
from jaxllm.sampling.choose import needs
from jaxllm.tokenizer import Tokenizer


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
