"""The shapes of what goes back: completions and chats, whole and in chunks, log-probabilities,
usage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from jaxllm.logprobs import each, prompt_entries, unpacked
from jaxllm.messages import PromptLogprobs, TextDelta, TokenLogprobs
from jaxllm.tokenizer import Tokenizer

LARGE = 4096  # bytes of packed log-probabilities that take a few milliseconds to write down
LOWEST = -9999.0  # stands for -inf, which JSON cannot say
DONE = b"data: [DONE]\n\n"


class TokenNames(Protocol):
    """What turns ids into strings for log-probabilities."""

    def token_text(self, id: int) -> str: ...
    def token_bytes(self, id: int) -> bytes: ...


class NamelessTokens:
    """Stands in when the server runs without a tokenizer."""

    def token_text(self, id: int) -> str:
        """The id, in the field's notation."""
        return f"token_id:{id}"

    def token_bytes(self, id: int) -> bytes:
        """The bytes of `token_text`."""
        return self.token_text(id).encode()


type Entry = TokenLogprobs | int  # an id: the first token of a prompt, which nothing foretells


@dataclass(slots=True)
class Columns:
    """Log-probabilities in the shape of completions; `end` is where the next token's text
    begins."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[orjson.Fragment | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    end: int = 0

    def shape(self, before: Columns | None = None) -> dict[str, list[Any]]:
        """As JSON, behind those `before`."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {
            name: [*getattr(before, name), *getattr(self, name)] if before else getattr(self, name)
            for name in names
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoSpec:
    """What a reply tells of its prompts. With `texts` (echo) they come before what is generated,
    and their tokens' log-probabilities before those of what is generated, if `logprobs` are wanted;
    `generates` is false where only the prompts are wanted. `role` is whose message a chat's answer
    is."""

    prompts: list[list[int]]
    texts: list[str] | None = None
    logprobs: int | None = None
    generates: bool = True
    prompt_logprobs: int | None = None
    role: str = "assistant"


@dataclass(slots=True)
class Choice:
    """One choice as it grows."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # those with log-probabilities, which are
    packed: bytearray = field(default_factory=bytearray)
    tokens: int = 0
    offset: int = 0  # characters of the tokens whose logprobs were sent
    started: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def logprobs(self) -> Iterator[TokenLogprobs] | None:
        """Those so far of a reply that is sent whole; None when there are none."""
        return each(self.packed, self.token_ids) if self.token_ids else None


class Reply:
    """All choices of one HTTP request; subclasses know the endpoint's shape. Choice number = prompt
    × n + index."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(
        self, id: str, model: str, fingerprint: str, shown: EchoSpec, n: int, names: TokenNames
    ):
        self.id = self.prefix + id
        self.created = int(time.time())
        self._static = {"created": self.created, "model": model, "system_fingerprint": fingerprint}
        self._shown, self._n, self._names = shown, n, names
        self._choices = [Choice() for _ in range(len(shown.prompts) * n)]
        self._prompt_tokens = sum(map(len, shown.prompts))
        self._cached = [0] * len(shown.prompts)
        self._scores: dict[int, PromptLogprobs] = {}
        # Prompts' log-probabilities as written down, once for all their choices
        self._scored: dict[int, orjson.Fragment] = {}
        self._head = (
            b"data: "
            + orjson.dumps({"id": self.id, "object": self.chunk_kind, **self._static})[:-1]
            + b',"choices":['
        )
        self._tail = b"]}\n\n"
        self._always = False

    def with_usage(self, at_end: bool, always: bool) -> None:
        """Which chunks say the usage; those that do not say null once a client has asked for it."""
        self._always = always
        if at_end:
            self._tail = b'],"usage":null}\n\n'

    @property
    def large(self) -> bool:
        """Whether a reply that is sent whole takes long to write down."""
        return bool(self._scores) or sum(len(choice.packed) for choice in self._choices) > LARGE

    def add(self, prompt: int, delta: TextDelta) -> None:
        """Take a delta of a reply that is sent whole."""
        choice = self._note(prompt, delta)
        choice.text.append(delta.text)
        if delta.logprobs is not None:
            choice.token_ids += delta.token_ids
            choice.packed += delta.logprobs

    def events(self, prompt: int, delta: TextDelta) -> bytes:
        """The server-sent events for one delta."""
        choice = self._note(prompt, delta)
        index = prompt * self._n + delta.index
        tail = b'],"usage":' + orjson.dumps(self.usage()) + b"}\n\n" if self._always else self._tail
        return b"".join(
            self._head + orjson.dumps(body) + tail for body in self._chunks(index, choice, delta)
        )

    def all_events(self, deltas: Iterable[tuple[int, TextDelta]]) -> bytes:
        """The server-sent events for the deltas of one step, each with its prompt's number."""
        return b"".join([self.events(prompt, delta) for prompt, delta in deltas])

    def usage_event(self) -> bytes:
        """The chunk without choices that ends a stream for clients that asked for usage."""
        return self._head + b'],"usage":' + orjson.dumps(self.usage()) + b"}\n\n"

    def whole(self) -> dict[str, Any]:
        """The reply that is sent at once."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return {
            "id": self.id,
            "object": self.kind,
            **self._static,
            "choices": choices,
            "usage": self.usage(),
        }

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        prompt, completion = self._prompt_tokens, sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def _note(self, prompt: int, delta: TextDelta) -> Choice:
        choice = self._choices[prompt * self._n + delta.index]
        choice.tokens += len(delta.token_ids)
        self._cached[prompt] = max(self._cached[prompt], delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            self._scores[prompt] = delta.prompt_logprobs
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return choice

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _prompt_entries(self, prompt: int, top: int) -> Iterator[Entry]:
        """Every token of a prompt, with so many of the most likely ones."""
        ids = self._shown.prompts[prompt]
        yield ids[0]
        for at in prompt_entries(self._scores[prompt], ids):
            at.top = at.top[:top]
            yield at

    def _prompt_logprobs(self, prompt: int) -> dict[str, Any]:
        """The field `prompt_logprobs` if it was asked for: of each token of the prompt id →
        log-probability, null for the first."""
        top = self._shown.prompt_logprobs
        if top is None:
            return {}
        if prompt not in self._scored:
            found = self._prompt_entries(prompt, top) if prompt in self._scores else ()
            cells = [orjson.dumps(None if isinstance(at, int) else self._by_id(at)) for at in found]
            self._scored[prompt] = orjson.Fragment(b"[%s]" % b",".join(cells))
        return {"prompt_logprobs": self._scored[prompt]}

    def _by_id(self, at: TokenLogprobs) -> dict[str, dict[str, Any]]:
        others = [
            (id, value, rank) for rank, (id, value) in enumerate(at.top, 1) if id != at.token_id
        ]
        text = self._names.token_text
        ranked = [(at.token_id, at.logprob, at.rank), *others]
        return {
            str(id): {"logprob": finite(value), "rank": rank, "decoded_token": text(id)}
            for id, value, rank in ranked
        }


class CompletionReply(Reply):
    """/v1/completions"""

    prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, id: str, model: str, fingerprint: str, shown: EchoSpec, n: int, names: TokenNames
    ):
        super().__init__(id, model, fingerprint, shown, n, names)
        self._echoes: dict[int, Columns] = {}  # of prompts, once for all their choices

    def _note(self, prompt: int, delta: TextDelta) -> Choice:
        """As for every reply; where only the prompts are wanted, what was generated does not
        count."""
        choice = super()._note(prompt, delta)
        if not self._shown.generates:
            choice.tokens, choice.stop_reason = 0, None
            choice.finish_reason = choice.finish_reason and "length"
        return choice

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        first, choice.started = not choice.started, True
        before, foretold = self._before(index // self._n) if first else ("", None)
        said, entries = (delta.text, entries_of(delta)) if self._shown.generates else ("", None)
        body = {
            "index": index,
            "text": before + said,
            "logprobs": self._logprobs(choice, foretold, entries),
        }
        return [body | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}]

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        prompt = index // self._n
        before, foretold = self._before(prompt)
        said, entries = (
            ("".join(choice.text), choice.logprobs) if self._shown.generates else ("", None)
        )
        body = {
            "index": index,
            "text": before + said,
            "logprobs": self._logprobs(choice, foretold, entries),
        }
        return (
            body
            | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            | self._prompt_logprobs(prompt)
        )

    def _before(self, prompt: int) -> tuple[str, Columns | None]:
        """What an echo puts before what is generated."""
        shown = self._shown
        if shown.texts is None:
            return "", None
        if shown.logprobs is not None and prompt in self._scores and prompt not in self._echoes:
            self._echoes[prompt] = self._columns(self._prompt_entries(prompt, shown.logprobs), 0)
        return shown.texts[prompt], self._echoes.get(prompt)

    def _logprobs(
        self, choice: Choice, before: Columns | None, found: Iterable[Entry] | None
    ) -> dict[str, list[Any]] | None:
        if found is None and before is None:
            return None
        columns = self._columns(found or (), choice.offset if before is None else before.end)
        choice.offset = columns.end
        return columns.shape(before)

    def _columns(self, found: Iterable[Entry], offset: int) -> Columns:
        """Log-probabilities of tokens of which the first is so far from the beginning of the
        text."""
        columns = Columns(end=offset)
        for at in found:
            text, logprob, top = (
                (self._names.token_text(at), None, None) if isinstance(at, int) else self._named(at)
            )
            columns.tokens.append(text)
            columns.token_logprobs.append(logprob)
            columns.top_logprobs.append(top)
            columns.text_offset.append(columns.end)
            columns.end += len(text)
        return columns

    def _named(self, at: TokenLogprobs) -> tuple[str, float, orjson.Fragment]:
        """A token's text, its log-probability, and those of the most likely texts."""
        text, logprob = self._names.token_text(at.token_id), finite(at.logprob)
        top: dict[str, float] = {}
        for id, value in at.top:
            top.setdefault(self._names.token_text(id), finite(value))
        top.setdefault(text, logprob)
        return text, logprob, written(top)


class ChatReply(Reply):
    """/v1/chat/completions"""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if not choice.started:
            choice.started = True
            opening = {"role": self._shown.role, "content": ""}
            deltas = [opening, *({"content": text} for text in self._shown.texts or ())]
            chunks = [
                {"index": index, "delta": said, "logprobs": None, "finish_reason": None}
                for said in deltas
            ]
        if delta.token_ids or delta.text or delta.finish_reason is not None:
            said = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
            body = {
                "index": index,
                "delta": said,
                "logprobs": self._logprobs(entries_of(delta)),
                "finish_reason": delta.finish_reason,
            }
            if delta.finish_reason is not None:
                body["stop_reason"] = delta.stop_reason
            chunks.append(body)
        return chunks

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {
            "role": self._shown.role,
            "content": "".join([*(self._shown.texts or ()), *choice.text]),
            "refusal": None,
        }
        body = {"index": index, "message": message, "logprobs": self._logprobs(choice.logprobs)}
        return body | {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def whole(self) -> dict[str, Any]:
        """The reply that is sent at once."""
        return super().whole() | self._prompt_logprobs(0)

    def _logprobs(self, found: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        content = []
        for at in found:
            top = [self._named(id, value) for id, value in at.top]
            content.append(written(self._named(at.token_id, at.logprob) | {"top_logprobs": top}))
        return {"content": content, "refusal": None}

    def _named(self, id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.token_text(id),
            "logprob": finite(logprob),
            "bytes": list(self._names.token_bytes(id)),
        }


def large(deltas: Iterable[tuple[int, TextDelta]]) -> bool:
    """Whether the events of these deltas take long to write down."""
    return (
        sum(
            LARGE + 1 if delta.prompt_logprobs is not None else len(delta.logprobs or b"")
            for _, delta in deltas
        )
        > LARGE
    )


def entries_of(delta: TextDelta) -> list[TokenLogprobs] | None:
    """The log-probabilities of a delta's tokens, if they were asked for."""
    return None if delta.logprobs is None else unpacked(delta.logprobs, delta.token_ids)


def written(value: Any) -> orjson.Fragment:
    """JSON as text: the log-probabilities of a long reply as objects are so many that Python's
    collector would stop streams for them."""
    return orjson.Fragment(orjson.dumps(value))


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry; NaN counts as the lowest."""
    return logprob if logprob > LOWEST else LOWEST


def names_of(tokenizer: Tokenizer | None) -> TokenNames:
    """Strings of tokens, from the tokenizer where there is one."""
    return tokenizer if tokenizer is not None else NamelessTokens()
