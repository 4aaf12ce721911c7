"""What all replies share: choices as they grow, usage, events, log-probabilities of prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import orjson

from jaxllm.logprobs import entries_of, prompt_entries, unpacked
from jaxllm.messages import PromptLogprobs, TextDelta, TokenLogprobs
from jaxllm.server.errors import ApiError
from jaxllm.server.parsing.machine import Clear
from jaxllm.server.parsing.parts import Part, Reasoning
from jaxllm.server.parsing.pipeline import Pipeline

LARGE = 4096  # bytes of packed log-probabilities that take a few milliseconds to encode
LOWEST = -9999.0  # in place of -inf, which JSON lacks
DONE = b"data: [DONE]\n\n"


class TokenNames(Protocol):
    """Strings of token ids, for log-probabilities."""

    def token_text(self, id: int) -> str: ...
    def token_bytes(self, id: int) -> bytes: ...


class NamelessTokens:
    """Names tokens by their ids, for servers without a tokenizer."""

    def token_text(self, id: int) -> str:
        """The id, in the field's notation."""
        return f"token_id:{id}"

    def token_bytes(self, id: int) -> bytes:
        """The bytes of `token_text`."""
        return self.token_text(id).encode()


type Entry = TokenLogprobs | int  # an id: the first token of a prompt, which has no probability


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySpec:
    """The prompts, the parts of them that a reply repeats, and how it reads generated text.

    Attributes:
        texts: texts put before the generated ones; None without echo.
        logprobs: top log-probabilities of the echoed tokens; None for none.
        generates: false when only the prompts are scored.
        prompt_logprobs: top entries of the field of that name; None leaves it out.
        token_ids: whether the ids of the prompt and of each choice are returned.
        role: role of a chat's answer.
        new_pipeline: makes the parser of one choice; None leaves text as it is.
        page_offer: where other engines find the prompts' pages.
        hides_reasoning: log-probabilities of reasoning's tokens are left out, too.
    """

    prompts: list[list[int]]
    texts: list[str] | None = None
    logprobs: int | None = None
    generates: bool = True
    prompt_logprobs: int | None = None
    token_ids: bool = False
    role: str = "assistant"
    new_pipeline: Callable[[], Pipeline] | None = None
    hides_reasoning: bool = False
    page_offer: dict[str, Any] | None = None


class Frame(msgspec.Struct, frozen=True, gc=False):
    """The event that text becomes which needs no more thought: most tokens.

    Attributes:
        around: what stands before, between and after the JSON of the text.
        hot: finds what is no such text.
        thought: the text is reasoning.
    """

    around: tuple[bytes, ...]
    hot: Callable[[str], object]
    thought: bool


@dataclass(slots=True)
class Choice:
    """One choice as it grows.

    Attributes:
        token_ids: of a reply that is sent whole and returns them.
        scored: ids of the rows in `packed`.
        packed: log-probabilities of a reply that is sent whole (`jaxllm.logprobs`).
        offset: characters of the tokens whose log-probabilities were sent.
        begin: of the JSON of each chunk, for a chat.
        frame: of the next event, unless all deltas need thought.
        pipeline: reads the text of a chat's choice; None where it is not parsed.
        parts: of a parsed choice in a reply that is sent whole.
        held_tokens: of a thought's text that may be calls; else they are reasoning.
        cut: a stop string ended it within a call.
    """

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    packed: bytearray = field(default_factory=bytearray)
    tokens: int = 0
    offset: int = 0
    started: bool = False
    begin: bytes = b""
    frame: Frame | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    pipeline: Pipeline | None = None
    parts: list[Part] = field(default_factory=list)
    reasoning_tokens: int = 0
    held_tokens: int = 0
    cut: bool = False

    @property
    def called(self) -> bool:
        """Whether it has a tool call."""
        return self.pipeline is not None and self.pipeline.called

    @property
    def logprobs(self) -> Iterator[TokenLogprobs] | None:
        """The log-probabilities so far of a reply that is sent whole; None without any."""
        if self.scored:
            return entries_of(self.packed, self.scored)
        return None


class Reply:
    """All choices of one HTTP request; subclasses know the endpoint's shape.

    The number of a choice is prompt × n + index.
    """

    prefix = ""
    object_name = ""
    chunk_name = ""
    stream_type = b"text/event-stream; charset=utf-8"

    def __init__(
        self, id: str, model: str, fingerprint: str, spec: ReplySpec, n: int, names: TokenNames
    ):
        self.id = self.prefix + id
        self.created = int(time.time())
        self._common = {"created": self.created, "model": model, "system_fingerprint": fingerprint}
        self._spec = spec
        self._n = n
        self._names = names
        self._choices = [Choice() for _ in range(len(spec.prompts) * n)]
        self._prompt_tokens = sum(map(len, spec.prompts))
        self._cached = [0] * len(spec.prompts)
        self._misses: list[str | None] = [None] * len(spec.prompts)
        self._prompt_packed: dict[int, PromptLogprobs] = {}
        # Prompts' log-probabilities as JSON, encoded once for all their choices
        self._prompt_json: dict[int, orjson.Fragment] = {}
        self._prompt_ids: dict[int, orjson.Fragment] = {}
        begin = orjson.dumps({"id": self.id, "object": self.chunk_name, **self._common})[:-1]
        self._event_begin = b"data: " + begin
        self._event_head = self._event_begin + b',"choices":['
        self._event_tail = b"]}\n\n"
        self._usage_at_end = self._usage_in_chunks = False

    def with_usage(self, at_end: bool, always: bool) -> None:
        """Put usage into a last chunk, or into every chunk; other chunks then carry null."""
        self._usage_at_end = at_end
        self._usage_in_chunks = always
        if at_end:
            self._event_tail = b'],"usage":null}\n\n'

    @property
    def single(self) -> bool:
        """Whether there is one choice."""
        return len(self._choices) == 1

    @property
    def large(self) -> bool:
        """Whether a reply that is sent whole takes long to encode."""
        size = sum(len(choice.packed) + len(choice.token_ids) for choice in self._choices)
        if self._spec.token_ids:
            size += self._prompt_tokens * self._n
        return bool(self._prompt_packed) or size > LARGE

    def add_delta(self, prompt: int, delta: TextDelta) -> None:
        """Add a delta to a reply that is sent whole."""
        choice = self._update_choice(prompt, delta)
        choice.text.append(delta.text)
        if self._spec.token_ids:
            choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            choice.scored += delta.token_ids
            choice.packed += delta.logprobs

    def events(self, prompt: int, delta: TextDelta) -> bytes:
        """The server-sent events for one delta."""
        choice = self._update_choice(prompt, delta)
        frame = choice.frame
        goes_on = delta.text and delta.finish_reason is None and delta.logprobs is None
        if frame is not None and goes_on and not frame.hot(delta.text):
            if frame.thought:
                choice.reasoning_tokens += len(delta.token_ids)
            return orjson.dumps(delta.text).join(frame.around)
        index = prompt * self._n + delta.index
        if self._usage_in_chunks:
            tail = b'],"usage":' + orjson.dumps(self.usage()) + b"}\n\n"
        else:
            tail = self._event_tail
        if choice.started:
            first_head = self._event_head
        else:
            first_head = self._first_head(prompt)
        chunks = self._chunks(index, choice, delta)
        heads = [first_head, *[self._event_head] * len(chunks)]
        return b"".join([head + chunk + tail for head, chunk in zip(heads, chunks, strict=False)])

    def all_events(self, deltas: Iterable[tuple[int, TextDelta]]) -> bytes:
        """The server-sent events for (prompt number, delta) pairs."""
        return b"".join([self.events(prompt, delta) for prompt, delta in deltas])

    def usage_event(self) -> bytes:
        """The chunk without choices that ends a stream for clients that requested usage."""
        return self._event_head + b'],"usage":' + orjson.dumps(self.usage()) + b"}\n\n"

    def full_reply(self) -> dict[str, Any]:
        """The reply to a request without `stream`."""
        choices = [self._full_choice(index, choice) for index, choice in enumerate(self._choices)]
        reply: dict[str, Any] = {
            "id": self.id,
            "object": self.object_name,
            **self._common,
            "choices": choices,
            "usage": self.usage(),
        }
        if self._spec.page_offer:
            reply["kv_transfer_params"] = self._spec.page_offer
        return reply

    def last_events(self) -> bytes:
        """What ends a stream."""
        if self._usage_at_end:
            return self.usage_event() + DONE
        return DONE

    def error_events(self, error: ApiError) -> bytes:
        """What ends a stream that has failed."""
        return b"data: " + orjson.dumps(error.envelope()) + b"\n\n" + DONE

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        prompt = self._prompt_tokens
        completion = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def cached(self) -> list[tuple[int, str | None]]:
        """Of each prompt, how many tokens were found in the prefix cache, and why the next was
        not."""
        return list(zip(self._cached, self._misses, strict=True))

    def _update_choice(self, prompt: int, delta: TextDelta) -> Choice:
        """The choice that a delta belongs to, with its counts and end brought up to date."""
        choice = self._choices[prompt * self._n + delta.index]
        choice.tokens += len(delta.token_ids)
        if delta.num_cached_tokens > self._cached[prompt]:
            self._cached[prompt] = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self._prompt_packed[prompt] = delta.prompt_logprobs
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
            self._misses[prompt] = delta.prefix_miss or self._misses[prompt]
        return choice

    def _first_head(self, prompt: int) -> bytes:
        """What stands before the choice in a choice's first event."""
        return self._event_head

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[bytes]:
        """The `choices` members of the events for one delta, as JSON."""
        raise NotImplementedError

    def _frame(
        self, clear: Clear, around: tuple[bytes, ...], begin: bytes = b"", end: bytes = b""
    ) -> Frame | None:
        """The frame of clear text, whose chunk has `around` around it, within `begin` and `end`;
        None where each event has its own usage or token ids."""
        if self._usage_in_chunks or self._spec.token_ids:
            return None
        first, *between, last = around
        whole = (self._event_head + begin + first, *between, last + end + self._event_tail)
        return Frame(whole, clear.hot, clear.make is Reasoning)

    def _prompt_token_ids(self, prompt: int) -> dict[str, Any]:
        """The field `prompt_token_ids`, if requested, encoded once for all choices."""
        if not self._spec.token_ids:
            return {}
        if prompt not in self._prompt_ids:
            self._prompt_ids[prompt] = json_fragment(self._spec.prompts[prompt])
        return {"prompt_token_ids": self._prompt_ids[prompt]}

    def _token_ids(self, ids: list[int]) -> dict[str, Any]:
        """The field `token_ids` of a choice or chunk, if requested."""
        if self._spec.token_ids:
            return {"token_ids": ids}
        return {}

    def _full_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """A choice of a reply that is sent whole."""
        raise NotImplementedError

    def _prompt_entries(self, prompt: int, top: int) -> Iterator[Entry]:
        """Every token of a prompt, with its `top` most likely alternatives."""
        ids = self._spec.prompts[prompt]
        yield ids[0]
        for entry in prompt_entries(self._prompt_packed[prompt], ids):
            entry.top = entry.top[:top]
            yield entry

    def _prompt_logprobs(self, prompt: int) -> dict[str, Any]:
        """The field `prompt_logprobs`, if requested: a map from id to log-probability for each
        token of the prompt, null for the first."""
        top = self._spec.prompt_logprobs
        if top is None:
            return {}
        if prompt not in self._prompt_json:
            entries: Iterable[Entry] = ()
            if prompt in self._prompt_packed:
                entries = self._prompt_entries(prompt, top)
            cells = [
                orjson.dumps(None if isinstance(entry, int) else self._logprobs_by_id(entry))
                for entry in entries
            ]
            self._prompt_json[prompt] = orjson.Fragment(b"[%s]" % b",".join(cells))
        return {"prompt_logprobs": self._prompt_json[prompt]}

    def _logprobs_by_id(self, entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
        """The chosen token and the most likely others, by their ids."""
        others = [
            (id, value, rank)
            for rank, (id, value) in enumerate(entry.top, 1)
            if id != entry.token_id
        ]
        text = self._names.token_text
        ranked = [(entry.token_id, entry.logprob, entry.rank), *others]
        return {
            str(id): {"logprob": finite(value), "rank": rank, "decoded_token": text(id)}
            for id, value, rank in ranked
        }


def large(deltas: Iterable[tuple[int, TextDelta]]) -> bool:
    """Whether the events of these deltas take long to encode."""
    size = 0
    for _, delta in deltas:
        if delta.prompt_logprobs is not None:
            return True
        size += len(delta.logprobs or b"")
    return size > LARGE


def unpack_delta(delta: TextDelta) -> list[TokenLogprobs] | None:
    """The log-probabilities of a delta's tokens, if requested."""
    if delta.logprobs is None:
        return None
    return unpacked(delta.logprobs, delta.token_ids)


def json_fragment(value: Any) -> orjson.Fragment:
    """A value as encoded JSON: as Python objects, the log-probabilities of a long reply would keep
    the garbage collector busy and delay streams."""
    return orjson.Fragment(orjson.dumps(value))


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry; NaN counts as the lowest."""
    if logprob > LOWEST:
        return logprob
    return LOWEST
