"""Results of `LLM`, under vLLM's names. Imports no jax."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from jaxllm.logprobs import total, unpacked
from jaxllm.messages import GenerateRequest, RequestTimes, TextDelta

type TokenText = Callable[[int], str | None]


@dataclass(slots=True)
class Logprob:
    """One entry of a position's log-probabilities; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LazySequence[T](Sequence[T]):
    """A list whose entries are made when they are read.

    Objects for every token would cost the loop and the garbage collector more than the tokens. It
    equals a list of the same entries, prints like one, and is copied as one.
    """

    @abstractmethod
    def _entry(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._entry(position) for position in range(*index.indices(len(self)))]
        position = operator.index(index)
        size = len(self)
        if not -size <= position < size:
            raise IndexError(f"index {position} of {size} positions")
        return self._entry(position % size)

    def __eq__(self, sequence: object) -> bool:
        if not isinstance(sequence, (list, LazySequence)):
            return NotImplemented
        return len(self) == len(sequence) and all(map(operator.eq, self, sequence))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


class Positions(LazySequence[dict[int, Logprob]]):
    """Token id → log-probability at each position, the position's own token first."""

    def __init__(self, tokens: Sequence[int], packed: bytes, text_of: TokenText):
        # Rows of jaxllm.logprobs
        self._tokens = tuple(tokens)
        self._packed = packed
        self._text_of = text_of

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def total(self) -> float:
        """Sum of the tokens' log-probabilities."""
        return total(self._packed, len(self._tokens))

    def _entry(self, index: int) -> dict[int, Logprob]:
        size = len(self._packed) // len(self._tokens)
        (entry,) = unpacked(
            self._packed[index * size : (index + 1) * size], self._tokens[index : index + 1]
        )
        text_of = self._text_of
        token = entry.token_id
        mine = {token: Logprob(entry.logprob, entry.rank, text_of(token))}
        return mine | {
            i: Logprob(value, rank, text_of(i))
            for rank, (i, value) in enumerate(entry.top, 1)
            if i != token
        }


class PromptPositions(LazySequence[dict[int, Logprob] | None]):
    """`Positions` of a prompt, None for its first token."""

    def __init__(self, prompt: Sequence[int], packed: bytes, text_of: TokenText):
        self._rest = Positions(prompt[1:], packed, text_of)

    def __len__(self) -> int:
        return 1 + len(self._rest)

    def _entry(self, index: int) -> dict[int, Logprob] | None:
        if index:
            return self._rest[index - 1]
        return None


def nameless(token: int) -> None:
    """The text of a token where there is no tokenizer: None."""


@dataclass(slots=True)
class CompletionOutput:
    """One generated choice.

    Attributes:
        index: of the choice, from 0.
        text: generated text, "" without detokenisation.
        token_ids: generated tokens.
        cumulative_logprob: sum of the tokens' log-probabilities, if any were requested.
        logprobs: for each token, token id → Logprob; the chosen token is always in it.
        finish_reason: "stop", "length", "abort" or "error".
        stop_reason: the stop string or stop token id that ended it.
        error: the reason of "error"; the other fields hold the output before it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        """Whether this choice has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of a beam search. `tokens` and `text` start with the prompt; `logprobs` and
    `cum_logprob` are of the tokens after it."""

    tokens: list[int]
    logprobs: Sequence[dict[int, Logprob]]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        outputs: its choices, by index.
        finished: whether all choices have ended.
        metrics: times of its first choice, in seconds since the epoch.
        num_cached_tokens: tokens of the prompt found in the prefix cache.
        prompt_logprobs: of each token of the prompt; None for the first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    metrics: RequestTimes | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None


@dataclass(slots=True)
class PoolingOutput:
    """What a pooling model makes of a prompt: a float32 vector, or `[tokens, E]` of its tokens."""

    data: np.ndarray


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of the embedding's entries."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A number for each label, probabilities unless the request says otherwise."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit."""

    score: float


@dataclass(slots=True)
class PooledRequestOutput[T]:
    """The result of one pooling request.

    Attributes:
        num_cached_tokens: prompt tokens that were taken from the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: T
    num_cached_tokens: int = 0
    finished: bool = True

    def of[U](self, outputs: U) -> PooledRequestOutput[U]:
        """The same request with other outputs."""
        return PooledRequestOutput(
            self.request_id, self.prompt_token_ids, outputs, self.num_cached_tokens
        )


def beam_output(output: RequestOutput, prompt: str | None) -> BeamSearchOutput:
    """The choices of a beam search as sequences; `prompt` is their decoded prompt, None where there
    is no tokenizer."""
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=output.prompt_token_ids + choice.token_ids,
                logprobs=choice.logprobs or [],
                cum_logprob=choice.cumulative_logprob or 0.0,
                text=None if prompt is None else prompt + choice.text,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                error=choice.error,
            )
            for choice in output.outputs
        ]
    )


class OutputBuilder:
    """Collects the deltas of one prompt into its result. Texts and log-probabilities are joined
    when a choice ends, so that a long one takes linear time."""

    def __init__(self, request: GenerateRequest, prompt: str | None, text_of: TokenText):
        choices = [CompletionOutput(index) for index in range(request.params.n)]
        self.output = RequestOutput(request.id, prompt, request.prompt.tokens, choices)
        self._scored = request.params.logprobs is not None
        self._text_of = text_of
        self._texts: list[list[str]] = [[] for _ in choices]
        self._packed: list[list[bytes]] = [[] for _ in choices]

    def add_delta(self, delta: TextDelta) -> bool:
        """Add a delta. Returns whether it ended the request."""
        output = self.output
        choice = self.output.outputs[delta.index]
        if delta.text:
            self._texts[delta.index].append(delta.text)
        choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self._packed[delta.index].append(delta.logprobs)
        if delta.prompt_logprobs is not None and output.prompt_logprobs is None:
            output.prompt_logprobs = PromptPositions(
                output.prompt_token_ids, delta.prompt_logprobs.packed, self._text_of
            )
        if delta.finish_reason is None:
            return False
        choice.text = "".join(self._texts[choice.index])
        choice.finish_reason = delta.finish_reason
        choice.stop_reason = delta.stop_reason
        choice.error = delta.error
        choice.cumulative_logprob = delta.cumulative_logprob
        if self._scored:
            positions = Positions(
                choice.token_ids, b"".join(self._packed[choice.index]), self._text_of
            )
            choice.logprobs = positions
            if positions and choice.cumulative_logprob is None:
                choice.cumulative_logprob = positions.total
        output.num_cached_tokens = delta.num_cached_tokens
        output.metrics = output.metrics or delta.times
        output.finished = all(completion.finished() for completion in output.outputs)
        return output.finished
