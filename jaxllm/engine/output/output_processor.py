"""Requests on the output side: making their choices; from tokens to text, ends and counts. Imports
no jax."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxllm.config import Resolved
from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.constraints.token_masks import HELD_BACK, NONE_ALLOWED, accept_tokens
from jaxllm.engine.constraints.validation import LogitsOptionsReader
from jaxllm.engine.output.detok import Detokenizer
from jaxllm.engine.scheduling.plan import Span, Traffic
from jaxllm.engine.scheduling.request import PromptSharing, Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.logprobs import trimmed
from jaxllm.messages import (
    STEP_TOKENS,
    EngineStats,
    GenerateRequest,
    PromptLogprobs,
    TextDelta,
)
from jaxllm.sampling.choose import needs
from jaxllm.tokenizer import Tokenizer

SEEDS_AT_ONCE = 256


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
        eos_ids: frozenset[int],
        seed: int,
    ):
        self._max_model_len, self._tokenizer = resolved.max_model_len, tokenizer
        self._options, self._eos_ids = options, eos_ids
        self._seeds = RandomSeeds(seed)

    def make_state(self, request: GenerateRequest) -> RequestState:
        """The state of a validated request: one `Request` per choice; of a beam search the one that
        its beams start from."""
        params, prompt = request.params, request.prompt_token_ids
        limit = self._max_model_len - len(prompt)
        eos_ids = frozenset[int]() if params.ignore_eos else self._eos_ids
        seed = params.seed
        if seed is None:
            seed = self._seeds.draw()
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
                shares_pages=request.shares_pages and index == 0,
                needs=needs(params),
                top=params.logprobs or 0,
                logits_options=self._options.read_options(params, request.thinking),
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


@dataclass(slots=True)
class Counters:
    """Counts since the engine's start.

    Attributes:
        computed_tokens: of all steps.
        step_tokens: steps by their tokens, as in `EngineStats`.
        problem: found by the last self-check, "" for none.
    """

    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    computed_tokens: int = 0
    step_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    self_checks: int = 0
    self_check_failures: int = 0
    problem: str = ""

    def count_step(self, tokens: int) -> None:
        """Count a step that computes `tokens`."""
        self.steps += 1
        self.computed_tokens += tokens
        self.step_tokens[bisect_left(STEP_TOKENS, tokens)] += 1

    def snapshot(
        self,
        scheduler: Scheduler,
        unscheduled: int,
        compiles: int,
        late: tuple[int, int],
        traffic: Traffic,
        sleep_level: int,
    ) -> EngineStats:
        """A snapshot for metrics.

        Args:
            unscheduled: choices that wait for their grammar.
            compiles: programs compiled after warm-up.
            late: programs made behind `/ready`, and those yet to be made.
            traffic: pages copied to host memory and back.
            sleep_level: 0 while the engine is awake.
        """
        pools, prefix, offload = scheduler.pools, scheduler.pools[0].index, scheduler.offload
        return EngineStats(
            running=scheduler.running,
            waiting=scheduler.waiting + unscheduled,
            deferred=unscheduled,
            kv_usage=max(pool.usage for pool in pools),
            prefix_queries=0 if prefix is None else prefix.queries,  # an empty index is false
            prefix_hits=0 if prefix is None else prefix.hits,
            preemptions=scheduler.preemptions,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            steps=self.steps,
            computed_tokens=self.computed_tokens,
            step_tokens=tuple(self.step_tokens),
            host_usage=offload.host.used / offload.host.num_pages if offload else 0.0,
            pages_saved=traffic.saved,
            pages_loaded=traffic.loaded,
            self_checks=self.self_checks,
            self_check_failures=self.self_check_failures,
            self_check_problem=self.problem,
            compiles_after_warmup=compiles,
            late_programs=late[0],
            missing_programs=late[1],
            free_pages=sum(pool.free for pool in pools),
            num_pages=sum(pool.num_pages for pool in pools),
            sleep_level=sleep_level,
        )


class OutputProcessor:
    """Makes the deltas of an engine's requests.

    `states` holds the running requests by id. A request leaves it when its last choice ends.
    """

    def __init__(
        self,
        states: dict[str, RequestState],
        scheduler: Scheduler,
        grammars: Grammars,
        counters: Counters,
        eos_ids: frozenset[int],
    ):
        self._states = states
        self._scheduler = scheduler
        self._grammars = grammars
        self._counters = counters
        self._eos_ids = eos_ids

    def append_token(
        self, request: Request, token: int, now: float, logprobs: bytes | None
    ) -> TextDelta:
        """Append a token to a choice. Returns its delta, the last one where the token ends it."""
        request.output.append(token)
        request.first_token_at = request.first_token_at or now
        request.last_token_at = now
        self._counters.generation_tokens += 1
        self._scheduler.commit_tokens(request, 1)
        count, params, complete, text = len(request.output), request.params, False, ""
        if request.logits_options is not None:
            if (failure := accept_tokens(self._grammars, request, [token])) is not None:
                return self.fail_choice(request, failure, "structured_outputs", [token], logprobs)
            state = self._grammars.states.get(request)
            complete = state is not None and state.ended
        stopped = token in request.stops and count > params.min_tokens
        detokenizer = self._states[request.id].detokenizers[request.index]
        if detokenizer is not None:
            hidden = stopped or (complete and token in self._eos_ids)
            step = detokenizer.feed(
                [token] if not hidden or params.include_stop_str_in_output else []
            )
            text = step.text
            if step.stop is not None:
                return self.finish_choice(
                    request, [token], text, "stop", step.stop, logprobs=logprobs
                )
        if stopped or complete:
            named = stopped and (params.ignore_eos or token not in self._eos_ids)
            return self.finish_choice(
                request, [token], text, "stop", token if named else None, logprobs=logprobs
            )
        if count >= request.max_tokens:
            return self.finish_choice(request, [token], text, "length", None, logprobs=logprobs)
        return TextDelta(
            id=request.id,
            index=request.index,
            token_ids=[token],
            text=text,
            logprobs=logprobs,
            prompt_logprobs=None
            if params.prompt_logprobs is None
            else self._states[request.id].take_prompt_logprobs(request.index),
            num_cached_tokens=request.num_cached_tokens,
        )

    def answer(self, request: Request) -> TextDelta:
        """The only delta of a request that goes on without anybody who waits for its tokens."""
        return TextDelta(
            id=request.id,
            index=request.index,
            token_ids=[],
            text="",
            finish_reason="length",
            num_cached_tokens=request.num_cached_tokens,
            prefix_miss=request.prefix_miss,
            times=request.times,
        )

    def finish_choice(
        self,
        request: Request,
        tokens: list[int],
        text: str,
        reason: str,
        stop: int | str | None,
        *,
        error: str | None = None,
        logprobs: bytes | None = None,
        error_param: str | None = None,
    ) -> TextDelta:
        """The last delta of a choice; frees its pages and slot."""
        state = self._states[request.id]
        self._scheduler.finish(request)
        self._grammars.release(request)
        detokenizer = state.detokenizers[request.index]
        if detokenizer is not None and not isinstance(stop, str):
            text += detokenizer.finish()
        if all(choice.status is Status.FINISHED for choice in state.choices):
            del self._states[request.id]
        return TextDelta(
            id=request.id,
            index=request.index,
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=state.take_prompt_logprobs(request.index),
            finish_reason=reason,
            stop_reason=stop,
            num_cached_tokens=request.num_cached_tokens,
            prefix_miss=request.prefix_miss,
            times=request.times,
            error=error,
            error_param=error_param,
        )

    def fail_choice(
        self,
        request: Request,
        error: str,
        error_param: str | None = None,
        tokens: Sequence[int] = (),
        logprobs: bytes | None = None,
    ) -> TextDelta:
        """End a choice with an error. `error_param` names the field of the request that caused it,
        if one did; `tokens` are its last ones."""
        return self.finish_choice(
            request,
            [*tokens],
            "",
            "error",
            None,
            error=error,
            logprobs=logprobs,
            error_param=error_param,
        )

    def end_without_token(self, request: Request, reason: str) -> TextDelta:
        """End a choice that has no next token: with "stop" where its grammar may end here, and
        min_tokens or a ban kept it from doing so, else with an error."""
        if self._grammars.may_end(request):
            return self.finish_choice(request, [], "", "stop", None)
        param = {NONE_ALLOWED: "allowed_token_ids", HELD_BACK: "min_tokens"}.get(reason)
        if request in self._grammars.states:
            param = "structured_outputs"
        return self.fail_choice(request, reason, param)


def lost_choice(request_id: str, index: int) -> TextDelta:
    """The end of a choice that the engine has lost."""
    return TextDelta(
        id=request_id,
        index=index,
        token_ids=[],
        text="",
        finish_reason="error",
        error="the engine lost this request",
    )
