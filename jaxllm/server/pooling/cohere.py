"""The route that embeds in Cohere's form."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import batched
from typing import Any

import numpy as np

from jaxllm.pooling import Pooling
from jaxllm.server.endpoint import Reply
from jaxllm.server.errors import ApiError, bad_request, describe
from jaxllm.server.pooling.endpoint import Pooled, PoolingEndpoint, in_json
from jaxllm.server.pooling.requests import Form, Options, one_of, read_options, read_texts
from jaxllm.server.pooling.vectors import encode
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.conversation import Conversation
from jaxllm.server.requests.fields import read_optional
from jaxllm.server.requests.limits import MAX_PROMPTS, Rules
from jaxllm.server.requests.messages import read_messages
from jaxllm.tokenizer import Pair, Tokenizer

TRUNCATE = ("END", "START", "NONE")
TYPES = ("float", "base64", "binary", "ubinary")
IN_BITS = ("binary", "ubinary")
CUT = "set truncate to END or START"
RENDERED = 16  # conversations of a request at once: those of other requests come in between
COHERE_FIELDS = frozenset(
    "model input_type texts inputs images output_dimension embedding_types truncate max_tokens "
    "priority".split()
)
COHERE_BODY = BodyFields(sizes={"texts": None, "inputs": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereRequest:
    """Texts to embed.

    Attributes:
        texts: as they were sent, None where `inputs` were.
        prefix: the model's own text for inputs of this type, "" for none.
        conversations: what is rendered in place of the texts.
        types: in which vectors are written, of `TYPES`.
        most: tokens that an input may have, None for as many as the model takes.
    """

    options: Options
    texts: list[str] | None
    prefix: str
    conversations: list[Conversation]
    types: list[str]
    most: int | None


class Embed(PoolingEndpoint):
    """POST /v2/embed"""

    param = "texts"
    prefix = "embd"
    fields = COHERE_FIELDS
    cut = CUT

    def parse(self, body: dict[str, Any]) -> CohereRequest:
        """Texts, or inputs of several. Raises ApiError."""
        rules = self._state.rules
        if body.get("images") is not None:
            raise bad_request("images are not read; send texts", "images")
        if (body.get("texts") is None) == (body.get("inputs") is None):
            raise bad_request("texts is required, or inputs in its place", "texts")
        options = _options(body, rules)
        types = _types(body)
        size = options.params.dimensions or options.pooling.size
        if size % 8 and not set(types).isdisjoint(IN_BITS):
            raise bad_request(
                f"vectors of {size} numbers do not fill whole bytes; leave out "
                f"{' and '.join(IN_BITS)}, or choose another output_dimension",
                "embedding_types",
            )
        cut = one_of(body, "truncate", TRUNCATE) != "NONE"
        prefix = _prefix(body, options.pooling)
        texts: list[str] | None = None
        contents: list[Any] = []
        if body.get("texts") is None:
            contents = _contents(body["inputs"])
        elif not isinstance(body["texts"], list):
            raise bad_request(f"texts must be a list, got {describe(body['texts'])}", "texts")
        else:
            texts = read_texts(body["texts"], rules, "texts", cut)
            if prefix and self._state.renders is not None:
                contents = [*texts]
            else:
                contents = []
        with _named("inputs" if texts is None else "texts"):
            conversations = [_conversation(prefix, content, rules, cut) for content in contents]
        return CohereRequest(
            options=options,
            texts=texts,
            prefix=prefix,
            conversations=conversations,
            types=types,
            most=None if cut else body.get("max_tokens"),
        )

    def field(self, request: CohereRequest, index: int) -> str:
        """The one of both that was sent."""
        if request.texts is None:
            return "inputs"
        return "texts"

    async def tokenise(self, request: CohereRequest) -> list[Pair]:
        """A model with a chat template gets the text for a type of inputs as its system's."""
        params = request.options.params
        limit = self._state.resolved.max_model_len
        cut = params.length(limit), params.truncation_side
        if request.conversations:
            prompts = [
                Pair(params.truncated(ids, limit))
                for batch in batched(request.conversations, RENDERED)
                for ids in await asyncio.gather(
                    *(self._rendered(request, conversation) for conversation in batch)
                )
            ]
        else:
            texts = [request.prefix + text for text in request.texts or ()]

            def encode_all(tokenizer: Tokenizer) -> list[Pair]:
                return [*map(Pair, tokenizer.encode_all(texts, *cut))]

            prompts = await self.encoded(encode_all)
        longest = max(len(prompt.ids) for prompt in prompts)
        if request.most is not None and longest > request.most:
            raise bad_request(
                f"an input has {longest} tokens, more than max_tokens {request.most}; "
                f"shorten it, or {CUT}",
                "max_tokens",
            )
        return prompts

    async def _rendered(self, request: CohereRequest, conversation: Conversation) -> list[int]:
        truncated = request.options.params.truncate_prompt_tokens is not None
        with _named(self.field(request, 0)):
            return await self._state.render(conversation, truncated)

    def reply(self, request: CohereRequest, id: str, pooled: Pooled) -> Reply:
        """Cohere's form, whatever types were asked for."""
        members = {
            "id": id,
            "embeddings": {
                vector_type: _written(pooled.vectors, vector_type) for vector_type in request.types
            },
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": pooled.tokens, "image_tokens": 0},
            },
            "response_type": "embeddings_by_type",
        }
        return in_json(members | ({} if request.texts is None else {"texts": request.texts}))


def _options(body: dict[str, Any], rules: Rules) -> Options:
    """The options that other pooling routes have, too. Raises ApiError."""
    truncate = one_of(body, "truncate", TRUNCATE)
    most = read_optional(body, "max_tokens", int)
    limit = rules.resolved.max_model_len
    if most is not None and not 1 <= most <= limit:
        raise bad_request(f"max_tokens must be from 1 to {limit}, got {most}", "max_tokens")
    same = {name: body[name] for name in ("model", "priority") if name in body}
    if truncate == "NONE":
        kept = None
    elif most is None:
        kept = -1
    else:
        kept = most
    fields = {
        "dimensions": body.get("output_dimension"),
        "truncate_prompt_tokens": kept,
        "truncation_side": "left" if truncate == "START" else "right",
    }
    with _named("output_dimension", "dimensions"):
        return read_options(same | fields, rules, "embed", neutral={})


@contextmanager
def _named(field: str, option: str | None = None) -> Iterator[None]:
    """Errors name this field of the body, in place of any, or in place of `option` alone."""
    try:
        yield
    except ApiError as error:
        if option is None:
            error.param = field
        elif error.param == option:
            error.param, error.message = field, error.message.replace(option, field)
        raise


def _types(body: dict[str, Any]) -> list[str]:
    types = body.get("embedding_types")
    if types is None or types == []:
        return ["float"]
    if not isinstance(types, list) or any(vector_type not in TYPES for vector_type in types):
        raise bad_request(
            f"embedding_types must list some of {', '.join(TYPES)}, got {describe(types)}",
            "embedding_types",
        )
    return list(dict.fromkeys(types))


def _prefix(body: dict[str, Any], pooling: Pooling) -> str:
    """The model's text for the type of the inputs. Raises ApiError for a type without one."""
    input_type = read_optional(body, "input_type", str)
    known = dict(pooling.prompts)
    if input_type is None:
        return ""
    if input_type not in known:
        names = "has none"
        if known:
            names = f"has {', '.join(known)}"
        raise bad_request(
            f"input_type is {describe(input_type)}; this model {names}: leave it out, or put an "
            "instruction into the text",
            "input_type",
        )
    return known[input_type]


def _contents(value: Any) -> list[list[dict[str, str]]]:
    """The contents of `inputs`: parts of text. Raises ApiError."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PROMPTS:
        raise bad_request(f"inputs must be a list of 1 to {MAX_PROMPTS} objects", "inputs")
    contents = []
    for number, entry in enumerate(value):
        parts = None
        if isinstance(entry, dict):
            parts = entry.get("content")
        if not isinstance(parts, list) or not parts:
            raise bad_request(f"inputs[{number}] must have content, a list of parts", "inputs")
        for part in parts:
            if not (isinstance(part, dict) and part.get("type") == "text"):
                raise bad_request(f"inputs[{number}] may hold parts of type text alone", "inputs")
            if not isinstance(part.get("text"), str):
                raise bad_request(f"inputs[{number}] has a part without a text", "inputs")
        contents.append([{"type": "text", "text": part["text"]} for part in parts])
    return contents


def _conversation(prefix: str, content: Any, rules: Rules, cut: bool) -> Conversation:
    """The model's text for the type of inputs, and one input."""
    if prefix:
        system = [{"role": "system", "content": prefix}]
    else:
        system = []
    messages = [*system, {"role": "user", "content": content}]
    return Conversation(
        messages=read_messages(messages, rules, cut),
        add_generation_prompt=False,
        continue_final_message=False,
        template_kwargs=rules.template_kwargs,
    )


def _written(vectors: Sequence[np.ndarray], vector_type: str) -> list[Any]:
    """The vectors in one of `TYPES`; in bits, a number that is not negative is 1, the first the
    highest of its byte, and `binary` is 128 less."""
    if vector_type in ("float", "base64"):
        return [encode(vector, Form(encoding=vector_type)) for vector in vectors]
    bits = [np.packbits(vector >= 0) for vector in vectors]
    if vector_type == "ubinary":
        return bits
    return [(row ^ 0x80).view(np.int8) for row in bits]
