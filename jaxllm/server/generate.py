"""The two generating endpoints: parse, tokenise off the loop, submit, and send the deltas on, whole
or as a stream."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import replace
from typing import Any

import orjson

from jaxllm.messages import GenerateRequest
from jaxllm.sampling.options import OPTIONS, default_of
from jaxllm.server.engine.streams import Stream
from jaxllm.server.errors import ApiError, server_error
from jaxllm.server.openai.bodies import ClientGone, unless_gone, until_gone
from jaxllm.server.openai.replies import (
    DONE,
    ChatReply,
    CompletionReply,
    EchoSpec,
    NamelessTokens,
    Reply,
    large,
)
from jaxllm.server.openai.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    ChatRequest,
    CompletionRequest,
    Generation,
    check_length,
    check_scored,
    clamp,
    parse_chat,
    parse_completion,
)
from jaxllm.server.state import ServerState

MANY_IDS = 1 << 16  # of all prompts of a request
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

logger = logging.getLogger("jaxllm.server")


class Generate:
    """ASGI endpoint. Subclasses say how to parse, how to make token ids and which shape goes
    back."""

    param = ""
    fields: frozenset[str] = frozenset()
    reply: type[Reply]

    def __init__(self, server_state: ServerState):
        self._server_state = server_state

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI. Raises ApiError as long as no byte was sent."""
        server_state = self._server_state
        try:
            body = await server_state.bodies.read_json(scope, receive)
            server_state.note_unknown(body, self.fields)
            request = (
                await server_state.in_thread(self.parse, body)
                if many_ids(body.get("prompt"))
                else self.parse(body)
            )
            gone = asyncio.ensure_future(until_gone(receive))
            try:
                with server_state.working():
                    await self._run(request, gone, send)
            finally:
                gone.cancel()
        except ClientGone:
            return
        except ApiError as error:
            if error.status < 500 or error.status == 503:
                server_state.metrics.refused(error.code or "invalid")
            raise

    async def _run(
        self, request: CompletionRequest | ChatRequest, gone: asyncio.Future[None], send: Any
    ) -> None:
        server_state = self._server_state
        server_state.client.check_capacity(self.choices(request))
        id = secrets.token_hex(16)
        wanted, shown = await unless_gone(gone, self._prepare(id, request))
        names = NamelessTokens() if request.nameless else server_state.names
        reply = self.reply(
            id, request.model, server_state.fingerprint, shown, request.params.n, names
        )
        reply.with_usage(request.usage_at_end, request.usage_always)
        if server_state.log_requests:
            lengths = [len(one.prompt_token_ids) for one in wanted[:8]]
            logger.info(
                "%s: %d prompts of %s tokens%s", reply.id, len(wanted), lengths, asked(request)
            )
        stream = server_state.client.submit(wanted)
        if request.structure is not None:
            stream.field_names["structured_outputs"] = request.structure.field
        gone.add_done_callback(
            lambda _: stream.fail(ClientGone()) if not gone.cancelled() else None
        )
        try:
            if request.stream:
                await send_stream(stream, reply, request.usage_at_end, send)
            else:
                await send_whole(stream, reply, send)
        finally:
            stream.abort()

    async def _prepare(
        self, id: str, request: CompletionRequest | ChatRequest
    ) -> tuple[list[GenerateRequest], EchoSpec]:
        """What the engine is asked, and what the reply tells of the prompts. Raises ApiError."""
        server_state = self._server_state
        prompts = self.ready(request)
        if prompts is None:
            prompts = await server_state.in_thread(self.tokenise, request)
            prompts = [
                request.params.truncated(ids, server_state.resolved.max_model_len)
                for ids in prompts
            ]
        for ids in prompts:
            check_length(len(ids), server_state.resolved, self.param)
        check_scored([len(ids) for ids in prompts], request.params)
        grammar = (
            None if request.structure is None else await server_state.grammar(request.structure)
        )
        wanted = [
            GenerateRequest(
                id=f"{id}-{number}",
                prompt_token_ids=ids,
                params=clamp(request.params, len(ids), server_state.resolved),
                cache_salt=request.cache_salt,
                grammar=grammar,
            )
            for number, ids in enumerate(prompts)
        ]
        return wanted, await server_state.in_thread(
            self.shown, request, prompts
        ) if request.echo else self.shown(request, prompts)

    def parse(self, body: dict[str, Any]) -> CompletionRequest | ChatRequest:
        """Raises ApiError."""
        raise NotImplementedError

    def choices(self, request: Any) -> int:
        """How many choices it asks for."""
        return request.params.samples

    def ready(self, request: Any) -> list[list[int]] | None:
        """The token ids, when there is no text to tokenise."""
        return None

    def tokenise(self, request: Any) -> list[list[int]]:
        """Token ids of every prompt; runs in a thread."""
        raise NotImplementedError

    def shown(self, request: Any, prompts: list[list[int]]) -> EchoSpec:
        """What the reply tells of the prompts; for an echo it runs in a thread."""
        return EchoSpec(prompts=prompts, prompt_logprobs=request.prompt_logprobs)


class Completions(Generate):
    """POST /v1/completions"""

    param, fields, reply = "prompt", COMPLETION_FIELDS, CompletionReply

    def parse(self, body: dict[str, Any]) -> CompletionRequest:
        """See protocol.parse_completion."""
        return parse_completion(body, self._server_state.rules)

    def choices(self, request: CompletionRequest) -> int:
        """Those of every prompt."""
        return len(request.prompts) * request.params.samples

    def ready(self, request: CompletionRequest) -> list[list[int]] | None:
        """Prompts that came as token ids."""
        ids = [prompt for prompt in request.prompts if isinstance(prompt, list)]
        return ids if len(ids) == len(request.prompts) else None

    def tokenise(self, request: CompletionRequest) -> list[list[int]]:
        """Texts through the tokenizer, ids as they are."""
        return [
            self._server_state.encode(prompt, request.add_special_tokens)
            for prompt in request.prompts
        ]

    def shown(self, request: CompletionRequest, prompts: list[list[int]]) -> EchoSpec:
        """With echo, the prompts' texts as they were given; of token ids and of truncated prompts,
        what they decode to."""
        shown = super().shown(request, prompts)
        if not request.echo:
            return shown
        whole = request.params.truncate_prompt_tokens is None
        given = zip(request.prompts, prompts, strict=True)
        texts = [
            prompt if whole and isinstance(prompt, str) else self._server_state.text_of(ids)
            for prompt, ids in given
        ]
        return replace(
            shown, texts=texts, logprobs=request.params.logprobs, generates=request.generates
        )


class Chat(Generate):
    """POST /v1/chat/completions"""

    param, fields, reply = "messages", CHAT_FIELDS, ChatReply

    def parse(self, body: dict[str, Any]) -> ChatRequest:
        """See protocol.parse_chat."""
        return parse_chat(body, self._server_state.rules)

    def tokenise(self, request: ChatRequest) -> list[list[int]]:
        """The rendered conversation."""
        return [self._server_state.render(request.conversation)]

    def shown(self, request: ChatRequest, prompts: list[list[int]]) -> EchoSpec:
        """A message that is continued stays that of its role. With echo, the last message if it is
        of the answer's role."""
        last = request.conversation.messages[-1]
        role = last["role"] if request.conversation.continue_final_message else "assistant"
        shown = replace(super().shown(request, prompts), role=role)
        return (
            replace(shown, texts=[last["content"]])
            if request.echo and last["role"] == role
            else shown
        )


def many_ids(prompt: Any) -> bool:
    """Whether so many token ids came that it takes long to look at them."""
    # Which may be a million: they are not looked at here
    if not isinstance(prompt, list) or len(prompt) > MANY_IDS:
        return isinstance(prompt, list)
    return sum(len(ids) if isinstance(ids, list) else 1 for ids in prompt) > MANY_IDS


def asked(request: Generation) -> str:
    """The names of options that are not at their defaults, and how many items a list holds; never a
    value, which may be a client's text."""
    changed = {
        name: value
        for name in OPTIONS
        if (value := getattr(request.params, name)) != default_of(name)
    }
    names = [] if request.structure is None else [request.structure.field]
    names += [
        f"{name}[{len(value)}]" if isinstance(value, list) else name
        for name, value in changed.items()
    ]
    return f", with {', '.join(names)}" if names else ""


async def send_whole(stream: Stream, reply: Reply, send: Any) -> None:
    """Collect everything, then one JSON reply. Raises the request's ApiError."""
    while not stream.done:
        for prompt, delta in await stream.next_deltas():
            reply.add(prompt, delta)
    body = (
        await asyncio.to_thread(lambda: orjson.dumps(reply.whole()))
        if reply.large
        else orjson.dumps(reply.whole())
    )
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_stream(stream: Stream, reply: Reply, usage_at_end: bool, send: Any) -> None:
    """Server-sent events, one write per step. The status is sent with the first delta, so an error
    before that is a plain HTTP error.

    Raises ApiError only as long as nothing was sent.
    """
    begun = False
    try:
        while not stream.done:
            ready = await stream.next_deltas()
            if large(ready):
                data = await asyncio.to_thread(reply.all_events, ready)
            else:
                data = reply.all_events(ready)
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
                begun = True
            if stream.done:
                data += (reply.usage_event() if usage_at_end else b"") + DONE
            stream.begin_write()
            await send({"type": "http.response.body", "body": data, "more_body": not stream.done})
    except ClientGone:
        raise
    except ApiError as error:
        if not begun:
            raise
        await end_with(error, send)
    except Exception:
        if not begun:
            raise
        logger.exception("a stream failed")
        await end_with(server_error(), send)


async def end_with(error: ApiError, send: Any) -> None:
    """The error as the last event of a stream."""
    event = b"data: " + orjson.dumps(error.envelope()) + b"\n\n" + DONE
    await send({"type": "http.response.body", "body": event, "more_body": False})
