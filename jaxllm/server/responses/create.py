"""POST /v1/responses: makes one response, over its connection or in the background."""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import replace
from typing import Any

import orjson

from jaxllm.server.errors import ApiError, bad_request, describe, server_error, too_many
from jaxllm.server.generate import Chat, of_whole_lines, send_json
from jaxllm.server.openai.replies import NamelessTokens, ReplySpec
from jaxllm.server.requests.fields import read_optional
from jaxllm.server.responses.background import Background
from jaxllm.server.responses.history import (
    Shortened,
    encode,
    fitting,
    room_for_prompt,
)
from jaxllm.server.responses.items import MAX_ITEMS, Item, missing_item, read_input
from jaxllm.server.responses.output import Output, SummaryOutput
from jaxllm.server.responses.output_items import new_id
from jaxllm.server.responses.reply import Answer, ResponsesReply
from jaxllm.server.responses.requests import (
    FIELDS,
    RENAMED,
    Context,
    ResponsesRequest,
    parse_response,
)
from jaxllm.server.responses.store import Owner, ResponseStore, Stored, Turn
from jaxllm.server.state import ServerState
from jaxllm.server.transport.gone import ClientGone, unless_gone

NOTHING = Context(None, [])
MAX_HISTORY = 16 << 20  # bytes of stored items that a request may continue: < 0.1 s of reading

logger = logging.getLogger("jaxllm.server")


class Create(Chat):
    """Makes one response for one owner. `store` is None when responses are not kept."""

    param = "input"
    fields = FIELDS
    shape = ResponsesReply
    compacts = False  # whether every request asks for a summary of the conversation
    counts = False  # whether prompts are counted in place of being answered

    def __init__(self, server_state: ServerState, store: ResponseStore | None, owner: Owner):
        super().__init__(server_state)
        self._store = store
        self._owner = owner
        self._answer: Answer

    def parse(self, body: dict[str, Any]) -> ResponsesRequest:
        """See `requests.parse_response`."""
        check_depth(body)
        items = read_input(body.get("input"))
        items = self._resolved(items)
        compacts = self.compacts or (bool(items) and items[-1]["type"] == "compaction_trigger")
        context = replace(self._context(body), compacts=compacts, counts=self.counts)
        if items and items[-1]["type"] == "compaction_trigger":
            items.pop()
        request = parse_response(body, items, context, self._state.rules)
        if request.background and self._store_of(request) is None:
            remedy = "leave it out"
            if self._store is not None:
                remedy = "send store: true"
            raise bad_request(f"background needs responses that are stored; {remedy}", "background")
        return request

    async def tokenise(self, request: Any) -> list[list[int]]:
        """The rendered conversation; without its oldest messages if it may be truncated and does
        not fit."""
        if not request.truncates:
            return [await self._rendered(request, request.conversation.messages)]
        answer = request.generation.params.max_tokens
        room = room_for_prompt(self._state.resolved.max_model_len, answer)
        render = functools.partial(self._rendered, request)
        shorter = Shortened(request.conversation.messages, after=int(request.compacts))
        return [await fitting(shorter, room, render)]

    def new_reply(self, id: str, request: Any, spec: ReplySpec) -> ResponsesReply:
        """The reply, which fills the answer."""
        names = NamelessTokens() if request.generation.tokens_as_ids else self._state.names
        return self.shape(self._answer, self._state.fingerprint, spec, names)

    async def _run(self, request: Any, gone: asyncio.Future[None], send: Any) -> None:
        made = SummaryOutput if request.compacts else Output
        output = made(request.origins, request.summarised, request.sealed)
        store = self._store_of(request)
        self._answer = Answer(new_id("resp"), request, store is not None, output)
        if store is None:
            await super()._run(request, gone, send)
        elif request.background:
            await unless_gone(gone, self._run_behind(request, store, send))
        else:
            await super()._run(request, gone, self._storing(store, send))

    async def _run_behind(self, request: ResponsesRequest, store: ResponseStore, send: Any) -> None:
        """Begin to make the response; reply at once, or follow it."""
        self._state.client.check_capacity(1)
        turn = Turn(request.before, [encode(item) for item in request.items])
        response = Background(self._answer, self._owner, turn, store)
        store.keep(response)
        if request.generation.streaming.enabled:
            opening = self._answer.encoded(self._answer.opening())
            response.add([of_whole_lines(event) for event in opening])
        response.task = asyncio.create_task(self._make(request, response))
        if request.generation.streaming.enabled:
            await response.follow(-1, send)
        else:
            await send_json(response.json(), send)

    async def _make(self, request: ResponsesRequest, response: Background) -> None:
        """Make a response in the background, whatever happens."""
        answer = self._answer
        events = []
        try:
            with self._state.working():
                await super()._run(request, response.cancelled, response.collect)
        except ClientGone:
            if answer.running:
                events = answer.end("cancelled", None)
            else:
                events = []
        except Exception as error:
            if not isinstance(error, ApiError):
                logger.exception("a background response failed")
                error = server_error()
            events = [*answer.fail(error, None), answer.told("failed")]
        finally:
            if request.generation.streaming.enabled:
                response.add([of_whole_lines(event) for event in answer.encoded(events)])
            response.end(answer)

    def _storing(self, store: ResponseStore, send: Any) -> Any:
        """ASGI's send that stores the response before its end is sent."""

        async def sending(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                store.keep(self._stored())
            await send(message)

        return sending

    def _stored(self) -> Stored:
        """The response as it is stored."""
        answer = self._answer
        inputs = answer.request.items
        items = [encode(item) for item in (*inputs, *answer.output.items)]
        turn = Turn(answer.request.before, items)
        return Stored(answer.id, self._owner, turn, len(inputs), orjson.dumps(answer.shape()))

    def _store_of(self, request: ResponsesRequest) -> ResponseStore | None:
        if request.store:
            return self._store
        return None

    async def _rendered(
        self, request: ResponsesRequest, messages: list[dict[str, Any]]
    ) -> list[int]:
        """The token ids of messages."""
        try:
            return (await super().tokenise(with_messages(request, messages)))[0]
        except ApiError as error:
            error.param = RENAMED.get(error.param or "", error.param)
            raise

    def _resolved(self, items: list[Item]) -> list[Item]:
        """The items, with those that references name in their places. Raises ApiError."""
        resolved = []
        size = 0
        for number, item in enumerate(items):
            if item["type"] == "item_reference":
                stored = self._referred(item, f"input[{number}]")
                size += len(stored)
                if size > MAX_HISTORY:
                    raise self._long_history(
                        f"input refers to more than {MAX_HISTORY} bytes of items",
                        "input",
                    )
                item = orjson.loads(stored)
            resolved.append(item)
        return resolved

    def _long_history(self, reason: str, param: str) -> ApiError:
        """The refusal of more stored items than are read."""
        return too_many(self._state.resolved.max_model_len, reason, param)

    def _referred(self, item: Item, place: str) -> bytes:
        """The JSON of the item that a reference names. Raises ApiError(404)."""
        id = item.get("id")
        stored = None
        if self._store is not None and isinstance(id, str):
            stored = self._store.find_item(id, self._owner)
        if stored is None:
            raise missing_item(item, place)
        return stored

    def _context(self, body: dict[str, Any]) -> Context:
        """What `previous_response_id` stands for. Raises ApiError."""
        id = read_optional(body, "previous_response_id", str)
        if id is None:
            return NOTHING
        response = None
        if self._store is not None:
            response = self._store.find(id, self._owner)
        if response is None:
            raise ApiError(
                404,
                f"no response with the id {describe(id)} is stored; send all items as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if not response.body:
            raise bad_request(
                f"the response {id} is still being made; wait until it ends", "previous_response_id"
            )
        history = response.turn.history()
        if len(history) > MAX_ITEMS or sum(len(item) for _, item in history) > MAX_HISTORY:
            raise self._long_history(
                f"the conversation up to {id} has more than {MAX_ITEMS} items or {MAX_HISTORY} "
                "bytes (send the items that matter as input)",
                "previous_response_id",
            )
        return Context(response.turn, [orjson.loads(item) for _, item in history])


def check_depth(body: dict[str, Any]) -> None:
    """Raises ApiError(400) on a body that cannot be written as JSON again: responses and stored
    items repeat parts of it."""
    try:
        orjson.dumps([[[[body]]]])  # a response within an event, in a list
    except orjson.JSONEncodeError:
        raise bad_request("the body nests too deeply; nest it less deeply") from None


def with_messages(request: ResponsesRequest, messages: list[dict[str, Any]]) -> ResponsesRequest:
    """The request with other messages."""
    return replace(request, conversation=replace(request.conversation, messages=messages))
