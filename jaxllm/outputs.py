"""What `LLM` returns, under vLLM's names. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxllm.engine.request import RequestTimes


@dataclass(slots=True)
class Logprob:
    """One entry of a position's log-probabilities; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated choice. `logprobs[i]` maps token id → Logprob for output token i; the chosen token is always there."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this choice has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that a beam search found: `tokens` and `text` begin with the prompt, `logprobs` and their sum are of what follows it."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class RequestOutput:
    """One prompt's result; `metrics` holds the times of its first choice."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestTimes | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # of each token of the prompt; None for the first
