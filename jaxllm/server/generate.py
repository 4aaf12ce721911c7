"""Endpoints that generate: tokenise off the event loop, submit, send the reply."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson

from jaxllm.messages import GenerateRequest, RequestError, TextDelta, ThinkingBudget
from jaxllm.prepared import NO_ADDITIONS, Additions, count_logprobs, prepared
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import OPTIONS, SamplingParams, default_of
from jaxllm.server.endpoint import Endpoint, send_json
from jaxllm.server.engine.streams import Stream
from jaxllm.server.errors import ApiError, bad_request, server_error
from jaxllm.server.openai.answer_parts import continued_marker, new_pipeline
from jaxllm.server.openai.answer_structure import answer_structure, thinking_budget
from jaxllm.server.openai.chat_reply import ChatReply
from jaxllm.server.openai.completion_reply import CompletionReply
from jaxllm.server.openai.replies import NamelessTokens, Reply, ReplySpec, large
from jaxllm.server.requests.chat import ChatRequest, parse_chat
from jaxllm.server.requests.completion import CompletionRequest, parse_completion
from jaxllm.server.requests.generation import Generation
from jaxllm.server.requests.known_fields import CHAT_FIELDS, COMPLETION_FIELDS
from jaxllm.server.requests.limits import check_length, check_min_tokens, check_prompt_scoring
from jaxllm.server.requests.structure import Structure
from jaxllm.server.transport.connection import CHUNKS, Chunks
from jaxllm.server.transport.gone import ClientGone, unless_gone

# Characters beyond ASCII that end lines for some, as JSON may have them
LINE_ENDS = [(text.encode(), f"\\u{ord(text):04x}".encode()) for text in "\x85\u2028\u2029"]
PROMPT_END = 32  # tokens of a prompt, which hold the marker that may end it
MAX_LOGGED = 8  # prompts of a request

logger = logging.getLogger("jaxllm.server")


class Generate(Endpoint):
    """An ASGI endpoint; subclasses parse, tokenise and know the shape of the reply.

    Attributes:
        reply: type of the reply.
    """

    reply: type[Reply]

    async def _run(
        self, request: CompletionRequest | ChatRequest, gone: asyncio.Future[None], send: Any
    ) -> None:
        if self._state.resolved.pooling is not None:
            raise bad_request(
                "this model pools and generates nothing; ask for embeddings, classes or scores",
                code="wrong_runner",
            )
        self._state.client.check_capacity(self.count_choices(request))
        id = secrets.token_hex(16)
        requests, spec, structure = await unless_gone(gone, self._prepare(id, request))
        reply = self.new_reply(id, request, spec)
        if self._state.settings.log_requests:
            lengths = [
                len(engine_request.prompt.tokens) for engine_request in requests[:MAX_LOGGED]
            ]
            logger.info(
                "%s: %d prompts of %s tokens%s",
                reply.id,
                len(requests),
                lengths,
                changed_options(request.generation),
            )
        stream = self._submit(requests, gone)
        if structure is not None:
            stream.field_names["structured_outputs"] = structure.field
        try:
            if request.generation.streaming.enabled:
                await send_stream(stream, reply, send)
            else:
                await send_whole(stream, reply, send)
            if self._state.settings.log_requests:
                log_cached(reply)
        finally:
            stream.abort()

    async def _prepare(
        self, id: str, request: CompletionRequest | ChatRequest
    ) -> tuple[list[GenerateRequest], ReplySpec, Structure | None]:
        """The engine's requests, what the reply takes of this one, and the structure of the
        output. Raises ApiError."""
        generation = request.generation
        prompts = self.token_id_prompts(request)
        if prompts is None:
            prompts = await self.tokenise(request)
            limit = self._state.resolved.max_model_len
            prompts = [generation.params.truncated(ids, limit) for ids in prompts]
        for ids in prompts:
            check_length(len(ids), self._state.resolved, self.param)
            check_min_tokens(generation.params, len(ids), self._state.resolved)
        params = self._prepared(request, prompts)
        check_prompt_scoring([len(ids) for ids in prompts], params[0])
        end = self.prompt_end(request, prompts)
        structure = self.structure(request, end)
        grammar = None
        if structure is not None:
            grammar = await self._state.grammar(structure)
        thinking = self.thinking_budget(request, end)
        requests = [
            GenerateRequest(
                id=f"{id}-{number}",
                prompt=Prompt(ids),
                params=params[number],
                cache_salt=generation.cache_salt,
                grammar=grammar,
                thinking=thinking,
                shares_pages=generation.transfer.shares,
                page_offer=generation.transfer.offer,
            )
            for number, ids in enumerate(prompts)
        ]
        if generation.echo:
            spec = await self._state.in_thread(self.reply_spec, request, prompts, end)
        else:
            spec = self.reply_spec(request, prompts, end)
        if generation.transfer.shares:
            spec = replace(spec, page_offer=self._state.resolved.page_offer)
        return requests, spec, structure

    def _prepared(self, request: Any, prompts: list[list[int]]) -> list[SamplingParams]:
        """The sampling of each prompt. Raises ApiError."""
        wishes: SamplingParams = request.generation.params
        additions = self.additions(request)
        params = []
        for ids in prompts:
            if wishes.seed is None:
                additions = replace(additions, seed=self._state.client.draw_seed())
            try:
                params.append(prepared(wishes, self._state.resolved, len(ids), additions))
            except RequestError as error:
                raise bad_request(str(error), error.param) from None
        return params

    def new_reply(self, id: str, request: Any, spec: ReplySpec) -> Reply:
        """The reply, before the first token."""
        generation: Generation = request.generation
        names = NamelessTokens() if generation.tokens_as_ids else self._state.names
        reply = self.reply(
            id, generation.model, self._state.fingerprint, spec, generation.params.n, names
        )
        reply.with_usage(generation.streaming.usage_at_end, generation.streaming.usage_always)
        return reply

    def prompt_end(self, request: Any, prompts: list[list[int]]) -> str:
        """The end of the prompt, which shows whether the answer begins within a thought; "" where
        the answer has no thoughts."""
        return ""

    def structure(self, request: Any, prompt_end: str) -> Structure | None:
        """The constraint on the output; None leaves it free. Raises ApiError."""
        generation: Generation = request.generation
        return generation.structure

    def thinking_budget(self, request: Any, prompt_end: str) -> ThinkingBudget | None:
        """The limit of reasoning in the output."""
        return None

    def additions(self, request: Any) -> Additions:
        """What the endpoint adds to the sampling that is wished."""
        return NO_ADDITIONS

    def count_choices(self, request: Any) -> int:
        """Choices that the engine generates for it."""
        generation: Generation = request.generation
        return generation.params.samples

    def token_id_prompts(self, request: Any) -> list[list[int]] | None:
        """The prompts when they came as token ids, else None."""
        return None

    async def tokenise(self, request: Any) -> list[list[int]]:
        """Token ids of every prompt, made off the event loop. Raises ApiError."""
        raise NotImplementedError

    def reply_spec(self, request: Any, prompts: list[list[int]], prompt_end: str) -> ReplySpec:
        """The part of the prompts in the reply; with echo this runs in a thread."""
        generation: Generation = request.generation
        return ReplySpec(
            prompts=prompts,
            prompt_logprobs=generation.prompt_logprobs,
            token_ids=generation.returns_token_ids,
        )


class Completions(Generate):
    """POST /v1/completions"""

    param = "prompt"
    fields = COMPLETION_FIELDS
    reply = CompletionReply

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """See `completion.parse_completion`."""
        return parse_completion(body, self._state.rules)

    def count_choices(self, request: CompletionRequest) -> int:
        """The choices of all prompts."""
        return len(request.prompts) * request.generation.params.samples

    def additions(self, request: CompletionRequest) -> Additions:
        """An echo with log-probabilities has the prompt's, and tokens of a suffix's format end the
        text before it."""
        infill = self._state.rules.infill
        ends = () if request.suffix is None or infill is None else infill.ends
        generation = request.generation
        scores_prompt = generation.echo and generation.params.logprobs is not None
        return Additions(scores_prompt=scores_prompt, stop_token_ids=ends)

    def token_id_prompts(self, request: CompletionRequest) -> list[list[int]] | None:
        """The prompts, if all came as token ids."""
        ids = [prompt for prompt in request.prompts if isinstance(prompt, list)]
        if len(ids) == len(request.prompts):
            return ids
        return None

    async def tokenise(self, request: CompletionRequest) -> list[list[int]]:
        """Texts are encoded, token ids stay."""

        def encode() -> list[list[int]]:
            if request.suffix is not None:
                texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
                return [self._state.infill(text, request.suffix) for text in texts]
            return [
                self._state.encode(prompt, request.add_special_tokens) for prompt in request.prompts
            ]

        return await self._state.in_thread(encode)

    def reply_spec(
        self, request: CompletionRequest, prompts: list[list[int]], prompt_end: str
    ) -> ReplySpec:
        """With echo, the prompts' texts as given; token ids and truncated prompts are decoded."""
        spec = super().reply_spec(request, prompts, prompt_end)
        if not request.generation.echo:
            return spec
        params = request.generation.params
        whole = params.truncate_prompt_tokens is None
        pairs = zip(request.prompts, prompts, strict=True)
        texts = [
            prompt if whole and isinstance(prompt, str) else self._state.decode_prompt(ids)
            for prompt, ids in pairs
        ]
        top = count_logprobs(params, "logprobs", self._state.resolved)
        return replace(spec, texts=texts, logprobs=top, generates=request.generates)


class Chat(Generate):
    """POST /v1/chat/completions, and what endpoints share that make a ChatRequest of their body."""

    param = "messages"
    fields = CHAT_FIELDS
    reply: type[Reply] = ChatReply

    def parse(self, body: dict[str, Any]) -> ChatRequest:
        """See `chat.parse_chat`."""
        return parse_chat(body, self._state.rules)

    def additions(self, request: ChatRequest) -> Additions:
        """Parsers see special tokens that are markers."""
        markers = self._state.formats.special(bool(request.tools.callable))
        return Additions(shows_special_tokens=bool(markers))

    def prompt_end(self, request: ChatRequest, prompts: list[list[int]]) -> str:
        """The end of the one prompt; for a continued message, its last marker of reasoning."""
        marker = continued_marker(request.conversation, self._state.formats)
        return marker or self._state.decode_prompt(prompts[0][-PROMPT_END:])

    def structure(self, request: ChatRequest, prompt_end: str) -> Structure | None:
        """See `answer_structure`. Where the template shows one call of a message, the grammar of
        calls allows no second."""
        if not self._state.several_calls(request.conversation):
            tools = replace(request.tools, parallel=False)
            request = replace(request, conversation=replace(request.conversation, tools=tools))
        return answer_structure(request, self._state.formats, prompt_end)

    def thinking_budget(self, request: ChatRequest, prompt_end: str) -> ThinkingBudget | None:
        """See `answer_structure.thinking_budget`."""
        return thinking_budget(request, self._state.formats, prompt_end)

    async def tokenise(self, request: ChatRequest) -> list[list[int]]:
        """The rendered conversation."""
        if request.tools.callable and self._state.formats.tools is None:
            raise bad_request(
                "this model's chat template shows no format of tool calls that the server knows; "
                "send tool_choice none, or start the server with --tool-call-parser",
                "tools",
                "unsupported_parameter",
            )
        truncated = request.generation.params.truncate_prompt_tokens is not None
        return [await self._state.render(request.conversation, truncated)]

    def reply_spec(
        self, request: ChatRequest, prompts: list[list[int]], prompt_end: str
    ) -> ReplySpec:
        """A continued message keeps its role. With echo, the last message is repeated if it has
        the answer's role."""
        last = request.conversation.messages[-1]
        role = "assistant"
        if request.conversation.continue_final_message:
            role = last["role"]
        spec = replace(
            super().reply_spec(request, prompts, prompt_end),
            role=role,
            hides_reasoning=not request.include_reasoning,
            new_pipeline=new_pipeline(request, self._state.formats, prompt_end),
        )
        if request.generation.echo and last["role"] == role:
            return replace(spec, texts=[last["content"]])
        return spec


def log_cached(reply: Reply) -> None:
    """Log how much of each prompt was in the prefix cache, and why no more was."""
    cached = reply.cached()[:MAX_LOGGED]
    texts = []
    for count, why in cached:
        text = f"{count} tokens cached"
        if why:
            text += f", then {why}"
        texts.append(text)
    counts, reasons = zip(*cached, strict=True)
    fields = {"cached_tokens": counts, "prefix_misses": reasons}
    logger.info("%s: %s", reply.id, "; ".join(texts), extra={"fields": fields})


def changed_options(generation: Generation) -> str:
    """Names of options that differ from their defaults, with the lengths of lists.

    Values are left out: they may be a client's text.
    """
    changed = {
        name: value
        for name in OPTIONS
        if (value := getattr(generation.params, name)) != default_of(name)
    }
    if generation.structure is not None:
        names = [generation.structure.field]
    else:
        names = []
    names += [
        f"{name}[{len(value)}]" if isinstance(value, list) else name
        for name, value in changed.items()
    ]
    if names:
        return f", with {', '.join(names)}"
    return ""


async def send_whole(stream: Stream, reply: Reply, send: Any) -> None:
    """Collect everything, then one JSON reply. Raises the request's ApiError."""
    while not stream.done:
        for prompt, delta in await stream.next_deltas():
            reply.add_delta(prompt, delta)
    if reply.large:
        body = await asyncio.to_thread(lambda: orjson.dumps(reply.full_reply()))
    else:
        body = orjson.dumps(reply.full_reply())
    await send_json(body, send)


def of_whole_lines(events: bytes) -> bytes:
    """Events of JSON in which no character ends a line that should not: many clients split lines as
    Python's `str.splitlines` does, within a string's text, too."""
    if 0xC2 in events or 0xE2 in events:  # their first bytes, which are found in 50 ns
        for character, escaped in LINE_ENDS:
            events = events.replace(character, escaped)
    return events


def stream_headers(content_type: bytes = Reply.stream_type) -> list[tuple[bytes, bytes]]:
    """The head of a stream, which proxies pass on as it comes."""
    return [
        (b"content-type", content_type),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]


def writer(reply: Reply, chunks: Chunks) -> Callable[[int, TextDelta], bool]:
    """Writes the events of a delta if a write is all it takes; returns whether it did."""

    def write(prompt: int, delta: TextDelta) -> bool:
        if not chunks.open or delta.finish_reason is not None:
            return False
        if delta.logprobs is not None or delta.prompt_logprobs is not None:
            return False
        if data := reply.all_events([(prompt, delta)]):
            chunks.write(of_whole_lines(data))
        return True

    return write


async def send_stream(stream: Stream, reply: Reply, send: Any) -> None:
    """Server-sent events, one write per step; that of a single choice is written as it comes.

    The status is sent with the first delta, so an earlier error is a plain HTTP error. Raises
    ApiError only before anything is sent; a later one becomes the last event.
    """
    started = False
    try:
        while not stream.done:
            ready = await stream.next_deltas()
            if large(ready):
                data = await asyncio.to_thread(reply.all_events, ready)
            else:
                data = reply.all_events(ready)
            if not started:
                headers = stream_headers(reply.stream_type)
                start: dict[str, Any] = {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": headers,
                }
                await send(start)
                started = True
                if CHUNKS in start and reply.single:
                    stream.write_at_once(writer(reply, start[CHUNKS]))
            if stream.done:
                data += reply.last_events()
            data = of_whole_lines(data)
            stream.begin_write()
            await send({"type": "http.response.body", "body": data, "more_body": not stream.done})
    except Exception as error:
        if not started or isinstance(error, ClientGone):
            raise
        if not isinstance(error, ApiError):
            logger.exception("a stream failed")
            error = server_error()
        data = reply.error_events(error)
        await send({"type": "http.response.body", "body": data, "more_body": False})
