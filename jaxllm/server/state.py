"""What the routes of one model share: the engine's client, the tokenizer, the rules, the settings.

A server of several models has one for each.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jaxllm
from jaxllm.chat_template import TemplateError
from jaxllm.config import Resolved
from jaxllm.grammar.checker import Checker, job_of, special_tokens
from jaxllm.grammar.pieces import Composition
from jaxllm.grammar.structure import CompilerLost, StructureError
from jaxllm.kv_events.settings import KVEventSettings
from jaxllm.sampling.options import SamplingParams
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.engine.group import EngineGroup
from jaxllm.server.errors import bad_request, overloaded, sanitize
from jaxllm.server.grammar_queue import GrammarQueue
from jaxllm.server.metrics import Metrics
from jaxllm.server.model_notes import read_notes
from jaxllm.server.openai.replies import NamelessTokens, TokenNames
from jaxllm.server.parsing.formats import find_formats
from jaxllm.server.recorder import Recorder
from jaxllm.server.rendering.renders import Renders
from jaxllm.server.requests.bodies import Bodies
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.conversation import Conversation
from jaxllm.server.requests.infill import find_infill
from jaxllm.server.requests.limits import Rules
from jaxllm.server.requests.structure import Structure
from jaxllm.tokenizer import Tokenizer

MAX_UNKNOWN_NAMES = 256
# Sampling options whose defaults clients are told
SHOWN_DEFAULTS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
# The grammar in an error; that of a composition is no text of the client's
LISTING = re.compile(r"\n +1 \| .*", re.DOTALL)

logger = logging.getLogger("jaxllm.server")


@dataclass(frozen=True, kw_only=True)
class Cors:
    """What pages of other origins may do; nothing without `origins`."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The operator's choices about the HTTP side.

    Attributes:
        served: names of the model for clients.
        root: the model as the operator named it.
        admin_keys: without one, the operator's routes are closed.
        max_body_size: bytes of one request.
        stall_seconds: seconds without a step until /health answers 503.
        force_usage: whether every chunk of every stream carries usage.
        page: whether the page at / is served.
        docs: whether /docs and /openapi.json are served.
        reasoning_parser: name of the format, "auto" or "none"; so `tool_call_parser`.
        response_store: whether /v1/responses keeps responses.
        kv_events: what the engine publishes of its prefix cache; None: nothing.
    """

    served: tuple[str, ...]
    root: str
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    max_body_size: int = 32 << 20
    stall_seconds: float = 60.0
    log_requests: bool = False
    allow_special_tokens: bool = False
    cors: Cors = Cors()
    force_usage: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    page: bool = True
    docs: bool = True
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    response_store: bool = True
    kv_events: KVEventSettings | None = None


def _rules(
    settings: Settings, resolved: Resolved, tokenizer: Tokenizer | None, defaults: dict[str, Any]
) -> Rules:
    """What requests of this model must keep to; without a tokenizer they bring token ids."""
    rules = Rules(
        resolved=resolved,
        served=settings.served,
        longest_token=1,
        may_drop=False,
        defaults=defaults,
        template_kwargs=settings.template_kwargs,
        force_usage=settings.force_usage,
        infill=None,
    )
    if tokenizer is None:
        return rules
    return replace(
        rules,
        longest_token=tokenizer.longest_token,
        may_drop=tokenizer.may_drop,
        infill=find_infill(tokenizer),
    )


class ServerState:
    """One model. Only `draining` and the counters change after the start."""

    def __init__(
        self,
        settings: Settings,
        client: EngineGroup,
        tokenizer: Tokenizer | None,
        defaults: dict[str, Any],
        fields: BodyFields,
        renders: Renders | None = None,
    ):
        """
        Args:
            fields: those of the bodies of all routes.
            renders: of the tokenizer's chat templates, if they have been started already.
        """
        self.settings = settings
        self.client = client
        self.tokenizer = tokenizer
        self.resolved: Resolved = client.resolved
        self.rules = _rules(settings, self.resolved, tokenizer, defaults)
        self.formats = find_formats(
            settings.reasoning_parser,
            settings.tool_call_parser,
            None if tokenizer is None else tokenizer.format_signs,
        )
        self.metrics = [
            observed(engine, settings.served[0], number)
            for number, engine in enumerate(client.clients)
        ]
        self.recorder = Recorder(
            lambda: client.stats,
            [engine.first_token for engine in self.metrics],
            [engine.between_tokens for engine in self.metrics],
        )
        signs = ""
        if tokenizer is not None:
            signs = tokenizer.format_signs or ""
        self.has_thinking_switch = "enable_thinking" in signs
        self.notes = read_notes(Path(self.resolved.model_dir))
        self.names: TokenNames = NamelessTokens() if tokenizer is None else tokenizer
        self.fingerprint = fingerprint(self.resolved)
        self.created = int(time.time())
        self.draining = False
        self.bodies = Bodies(settings.max_body_size, fields, self.rules)
        self.active = 0  # HTTP requests that generate
        self.resting = 0  # operators who wait to put the model to sleep
        self.idle = asyncio.Event()
        self.idle.set()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        if tokenizer is None:
            self.grammars = None
        else:
            self.grammars = GrammarQueue(Checker(special_tokens(tokenizer.backend)))
        self.renders = renders
        if renders is None and tokenizer is not None:
            self.renders = renders_of(tokenizer, settings.template_kwargs)
        self._unknown: set[str] = set()

    @property
    def edge_metrics(self) -> Metrics:
        """Those that count what reaches no engine: the first engine's."""
        return self.metrics[0]

    async def grammar(self, structure: Structure) -> str:
        """The compiled constraint on an output. Raises ApiError."""
        if self.grammars is None:
            raise bad_request(
                "this server runs without a tokenizer, which structured output needs",
                structure.field,
            )
        try:
            return await self.grammars.compiled(await self.in_thread(job_of, structure.params))
        except CompilerLost as error:
            raise overloaded(
                f"{structure.field}: {sanitize(str(error))}", "grammar_compiler_lost"
            ) from None
        except StructureError as error:
            text = str(error)
            if isinstance(structure.params, Composition):
                text = LISTING.sub("", text)
            raise bad_request(
                f"{structure.field}: {sanitize(text)}", structure.field, "invalid_grammar"
            ) from None

    async def in_thread[**P, T](self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run CPU-bound work off the event loop. A panic in native code, which is no Exception,
        is raised as a RuntimeError."""

        def contained() -> T:
            try:
                return work(*args, **kwargs)
            except Exception:
                raise
            except BaseException as error:
                raise RuntimeError(f"{type(error).__name__} in native code") from error

        return await asyncio.get_running_loop().run_in_executor(self._threads, contained)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count an HTTP request as active; a drain waits for the last one. Raises ApiError while
        the model is `at_rest`."""
        if self.resting:
            raise overloaded("the model is being put to sleep; POST /wake_up", "sleeping")
        self.active += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if self.active == 0:
                self.idle.set()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Refuse new work, so that `idle` comes."""
        self.resting += 1
        try:
            yield
        finally:
            self.resting -= 1

    async def shut_down(self) -> None:
        """Release the threads and end the processes of grammars and templates at once."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self.recorder.stop()
        await self.end_renders()
        if self.grammars is not None:
            await self.grammars.shut_down()

    async def end_renders(self) -> None:
        """Refuse conversations, those that are being rendered included."""
        if self.renders is not None:
            await self.renders.shut_down()

    def encode(self, prompt: str | list[int], add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Raises ApiError."""
        if isinstance(prompt, list):
            return prompt
        ids = self._need_tokenizer("prompt").encode(prompt, add_special_tokens)
        if not ids:
            raise bad_request("the prompt has no tokens", "prompt")
        return ids

    def infill(self, prefix: str, suffix: str) -> list[int]:
        """Token ids of a prompt that asks for the text between two others."""
        assert self.rules.infill is not None  # as `limits.check_suffix` found
        return self.rules.infill.prompt(self._need_tokenizer("suffix"), prefix, suffix)

    def decode_prompt(self, prompt: list[int]) -> str:
        """The text of a prompt, special tokens included; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(prompt, skip_special_tokens=False)

    async def render(self, conversation: Conversation, truncated: bool = False) -> list[int]:
        """Token ids of a conversation, which are `truncated` afterwards. Raises ApiError."""
        tokenizer = self._need_tokenizer("messages")
        if self.renders is None:
            raise bad_request(
                "this model has no chat template; "
                "use completions, or start the server with --chat-template",
                "messages",
            )
        sanitized = not self.settings.allow_special_tokens
        try:
            arguments = conversation.template_input.arguments(tokenizer.templates)
            text = await self.renders.text_of(
                arguments,
                sanitized,
                self.rules.char_limit(truncated),
                lambda chars: self.rules.too_many_chars(chars, "messages", truncated),
            )
            ids = await self.in_thread(tokenizer.encode_chat, text, sanitized)
        except TemplateError as error:
            raise bad_request(sanitize(str(error)), error.param, "chat_template_error") from None
        if not ids:
            raise bad_request("the chat template made an empty prompt of the messages", "messages")
        return ids

    def several_calls(self, conversation: Conversation) -> bool:
        """Whether one answer to a conversation may have several calls, which its template could
        show later."""
        tools = conversation.shown_tools or None
        return self.renders is None or self.renders.traits_for(tools).several_calls

    def card(self, name: str) -> dict[str, Any]:
        """What /v1/models says of a served name, in the forms of OpenAI and Anthropic."""
        return {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": self.created,
            "created_at": datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "owned_by": "jaxllm",
            "root": self.settings.root,
            "parent": None,
            "max_model_len": self.resolved.max_model_len,
            "max_input_tokens": self.resolved.max_model_len,
            "permission": [],
            "description": self.notes.description,
            "examples": list(self.notes.examples),
            "default_parameters": {
                name: self.rules.defaults.get(name, getattr(SamplingParams, name))
                for name in SHOWN_DEFAULTS
            },
            "thinking_switch": self.has_thinking_switch,
            "family": self.resolved.model_type,
            "dtype": self.resolved.dtype,
        }

    def count_unknown_fields(self, body: dict[str, Any], known: frozenset[str]) -> None:
        """Count unknown fields, which are ignored, and log each name once."""
        for name in body.keys() - known:
            self.edge_metrics.unknown_fields += 1
            name = name[:64]
            if name not in self._unknown and len(self._unknown) < MAX_UNKNOWN_NAMES:
                self._unknown.add(name)
                logger.warning("ignoring the unknown request field %r (logged once)", name)

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request(
                "this server runs without a tokenizer; send token ids to /v1/completions", param
            )
        return self.tokenizer


def renders_of(tokenizer: Tokenizer, variables: dict[str, Any]) -> Renders | None:
    """What renders a model's conversations, where these variables of its templates have values;
    None for a model without a template."""
    if not tokenizer.has_chat_template:
        return None
    return Renders(tokenizer.template_facts(), variables)


def page_of_cards(states: Sequence[ServerState]) -> dict[str, Any]:
    """What /v1/models says: every served name, on one page."""
    cards = [state.card(name) for state in states for name in state.settings.served]
    first = cards[0]["id"]
    last = cards[-1]["id"]
    return {"object": "list", "data": cards, "has_more": False, "first_id": first, "last_id": last}


def observed(engine: EngineClient, model: str, number: int) -> Metrics:
    """The metrics of engine `number` of a model, which observe it from now on."""
    metrics = Metrics(model, engine.resolved, jaxllm.__version__, lambda: engine.stats, number)
    engine.observer = metrics
    return metrics


def fingerprint(resolved: Resolved) -> str:
    """An id of the version and of the resolved configuration."""
    digest = hashlib.sha256(repr(resolved).encode()).hexdigest()[:8]
    return f"jaxllm-{jaxllm.__version__}-tp{resolved.tensor_parallel_size}-{digest}"
