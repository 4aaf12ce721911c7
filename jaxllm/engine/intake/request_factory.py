"""From a request to its choices, with the seeds of their draws. Imports no jax."""

from __future__ import annotations

import hashlib

import numpy as np

from jaxllm.config import Resolved
from jaxllm.engine.intake.logits_options import LogitsOptionsReader
from jaxllm.engine.output.detok import Detokenizer
from jaxllm.engine.output.request_state import RequestState
from jaxllm.engine.scheduling.request import PromptSharing, Request
from jaxllm.messages import GenerateRequest, PromptLogprobs
from jaxllm.sampling.choose import needs
from jaxllm.tokenizer import Tokenizer

SEEDS_AT_ONCE = 256


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index`: the request's own for the first, unrelated 64-bit values for the
    others."""
    if index == 0:
        return seed
    digest = hashlib.sha256(
        b"jaxllm choice" + seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    ).digest()
    return int.from_bytes(digest[:8], "little")


class RandomSeeds:
    """64-bit seeds without end, which `seed` decides. They are drawn many at a time, which gives
    the same numbers."""

    def __init__(self, seed: int):
        self._generator = np.random.Generator(np.random.Philox(seed))
        self._drawn: list[int] = []  # the next one last

    def draw(self) -> int:
        """The next seed."""
        if not self._drawn:
            many = self._generator.integers(2**64, size=SEEDS_AT_ONCE, dtype=np.uint64)
            self._drawn = many[::-1].tolist()
        return self._drawn.pop()


class RequestFactory:
    """Makes the choices of requests, which nothing else knows yet. `seed` decides the draws of
    requests without a seed of their own."""

    def __init__(
        self,
        resolved: Resolved,
        tokenizer: Tokenizer | None,
        options: LogitsOptionsReader,
        seed: int,
    ):
        self._resolved = resolved
        self._tokenizer = tokenizer
        self._options = options
        self._seeds = RandomSeeds(seed)

    def make_state(self, request: GenerateRequest) -> RequestState:
        """The state of a validated request: one `Request` per choice; of a beam search the one that
        its beams start from."""
        params = request.params
        prompt = request.prompt
        stops = frozenset(params.stops(self._resolved.eos_ids))
        seed = params.seed
        if seed is None:
            seed = self._seeds.draw()
        state = RequestState()
        sharing = None
        if params.samples > 1:
            sharing = PromptSharing(state.choices)
        for index in range(1 if params.use_beam_search else params.samples):
            scores = params.prompt_logprobs is not None and index == 0
            choice = Request(
                id=request.id,
                index=index,
                prompt=prompt,
                params=params,
                seed=choice_seed(seed % 2**64, index),
                arrival=request.arrival,
                max_tokens=params.output_limit,
                cache_salt=request.cache_salt,
                shares_pages=request.shares_pages and index == 0,
                needs=needs(params),
                top=params.logprobs or 0,
                logits_options=self._options.read_options(params, request.thinking),
                score_end=len(prompt.tokens) - 1 if scores else 0,
                stops=stops,
                sharing=sharing,
            )
            state.choices.append(choice)
            state.detokenizers.append(self.make_detokenizer(choice))
        if params.prompt_logprobs is not None and len(prompt.tokens) == 1:
            state.prompt_logprobs = PromptLogprobs(top=params.prompt_logprobs, packed=b"")
        return state

    def make_detokenizer(self, choice: Request) -> Detokenizer | None:
        """Makes a choice's text; None when it has none."""
        if self._tokenizer is None or not choice.params.detokenize:
            return None
        return Detokenizer(self._tokenizer.backend, choice.prompt.tokens, choice.params)
