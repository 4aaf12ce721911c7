"""Replies of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from jaxllm.messages import TextDelta
from jaxllm.server.openai.replies import (
    Choice,
    Entry,
    Reply,
    ReplySpec,
    TokenNames,
    finite,
    json_fragment,
    unpack_delta,
)
from jaxllm.server.parsing.pipeline import ALL


@dataclass(slots=True)
class Columns:
    """Log-probabilities in the shape of completions; `end` is the offset of the next token's
    text."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[orjson.Fragment | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    end: int = 0

    def shape(self, before: Columns | None = None) -> dict[str, list[Any]]:
        """The reply's object, after the columns `before`."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        columns = {name: getattr(self, name) for name in names}
        if before is None:
            return columns
        return {name: [*getattr(before, name), *column] for name, column in columns.items()}


class CompletionReply(Reply):
    """/v1/completions"""

    prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self, id: str, model: str, fingerprint: str, spec: ReplySpec, n: int, names: TokenNames
    ):
        super().__init__(id, model, fingerprint, spec, n, names)
        self._echoes: dict[int, Columns] = {}  # of prompts, once for all their choices

    def _update_choice(self, prompt: int, delta: TextDelta) -> Choice:
        """As for every reply; when only the prompts are scored, generated tokens do not count."""
        choice = super()._update_choice(prompt, delta)
        if not self._spec.generates:
            choice.tokens = 0
            choice.stop_reason = None
            choice.finish_reason = choice.finish_reason and "length"
        return choice

    def _chunks(self, index: int, choice: Choice, delta: TextDelta) -> list[bytes]:
        first = not choice.started
        choice.started = True
        made = self._choice(index, choice, delta.text, unpack_delta(delta), echoes=first)
        made |= self._ids(index, delta.token_ids, begins=first)
        if first and self._spec.generates:
            empty = orjson.dumps(self._choice(index, Choice(), "", None, echoes=False))
            choice.frame = self._frame(ALL, tuple(empty.split(b'""')))
        return [orjson.dumps(made)]

    def _full_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        fields = self._choice(index, choice, "".join(choice.text), choice.logprobs, echoes=True)
        fields |= self._ids(index, choice.token_ids, begins=True)
        return fields | self._prompt_logprobs(index // self._n)

    def _ids(self, index: int, ids: list[int], begins: bool) -> dict[str, Any]:
        """The fields of token ids; what `begins` a choice has the prompt's, too."""
        if not self._spec.generates:
            ids = []
        fields = self._token_ids(ids)
        if begins:
            fields |= self._prompt_token_ids(index // self._n)
        return fields

    def _choice(
        self,
        index: int,
        choice: Choice,
        text: str,
        logprobs: Iterable[Entry] | None,
        echoes: bool,
    ) -> dict[str, Any]:
        """A choice's object with generated text; `echoes` puts the requested echo before it."""
        if not self._spec.generates:
            text = ""
            logprobs = None
        before = ""
        prompt_columns = None
        if echoes:
            before, prompt_columns = self._echo_of(index // self._n)
        return {
            "index": index,
            "text": before + text,
            "logprobs": self._logprobs(choice, prompt_columns, logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _echo_of(self, prompt: int) -> tuple[str, Columns | None]:
        """The echoed text of a prompt, and its log-probabilities."""
        spec = self._spec
        if spec.texts is None:
            return "", None
        if (
            spec.logprobs is not None
            and prompt in self._prompt_packed
            and prompt not in self._echoes
        ):
            self._echoes[prompt] = self._columns(self._prompt_entries(prompt, spec.logprobs), 0)
        return spec.texts[prompt], self._echoes.get(prompt)

    def _logprobs(
        self, choice: Choice, before: Columns | None, entries: Iterable[Entry] | None
    ) -> dict[str, list[Any]] | None:
        if entries is None and before is None:
            return None
        offset = choice.offset
        if before is not None:
            offset = before.end
        columns = self._columns(entries or (), offset)
        choice.offset = columns.end
        return columns.shape(before)

    def _columns(self, entries: Iterable[Entry], offset: int) -> Columns:
        """Log-probabilities of tokens whose text begins at `offset`."""
        columns = Columns(end=offset)
        for entry in entries:
            text, logprob, top = self._token_entry(entry)
            columns.tokens.append(text)
            columns.token_logprobs.append(logprob)
            columns.top_logprobs.append(top)
            columns.text_offset.append(columns.end)
            columns.end += len(text)
        return columns

    def _token_entry(self, entry: Entry) -> tuple[str, float | None, orjson.Fragment | None]:
        """A token's text, its log-probability, and those of the most likely texts. The first token
        of a prompt has the text alone."""
        if isinstance(entry, int):
            return self._names.token_text(entry), None, None
        text = self._names.token_text(entry.token_id)
        logprob = finite(entry.logprob)
        top: dict[str, float] = {}
        for id, value in entry.top:
            top.setdefault(self._names.token_text(id), finite(value))
        top.setdefault(text, logprob)
        return text, logprob, json_fragment(top)
