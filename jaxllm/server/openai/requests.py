"""OpenAI request bodies to typed requests, checked as far as possible without a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.chat_template import TemplateInput
from jaxllm.sampling.options import SamplingParams
from jaxllm.server.errors import bad_request, describe
from jaxllm.server.openai.chat import (
    CHAT_NEUTRAL,
    CHAT_ONLY,
    TOOL_FIELDS,
    for_template,
    read_documents,
    read_messages,
    read_template_kwargs,
)
from jaxllm.server.openai.fields import (
    IGNORED,
    NEUTRAL,
    STRUCTURE_FIELDS,
    WIRE_OPTIONS,
    is_one_of,
    read_field,
    read_optional,
    refuse_unsupported,
)
from jaxllm.server.openai.generation import Generation, read_generation
from jaxllm.server.openai.limits import (
    Rules,
    check_chars,
    check_choices,
    check_ids,
    check_suffix,
)
from jaxllm.server.openai.tools import NO_TOOLS, Tool, ToolUse, read_tool_use

MAX_PROMPTS = 1024

PROMPT_FORMS = "a string, a list of strings, token ids or a list of token id lists"

type Prompt = str | list[int]

_SHARED = frozenset(
    {
        *WIRE_OPTIONS,
        *NEUTRAL,
        *IGNORED,
        *STRUCTURE_FIELDS,
        "model",
        "stream",
        "stream_options",
        "add_special_tokens",
        "cache_salt",
        "kv_transfer_params",
    }
    | {"return_token_ids", "return_tokens_as_token_ids", "echo"}
)
# Fields of chats, with the values that request nothing
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {"top_logprobs": (0,), "max_completion_tokens": ()}
COMPLETION_ONLY: dict[str, tuple[Any, ...]] = {"prompt": ("", []), "suffix": ("",)}
COMPLETION_FIELDS = _SHARED | {*COMPLETION_ONLY, *COMPLETION_NEUTRAL, *CHAT_ONLY}
CHAT_FIELDS = COMPLETION_FIELDS | CHAT_NEUTRAL.keys()
TOKENIZE_FIELDS = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "add_special_tokens",
        "return_token_strs",
        "add_generation_prompt",
        "continue_final_message",
    }
    | {
        "chat_template",
        "chat_template_kwargs",
        "reasoning_effort",
        "thinking_token_budget",
        "documents",
        *TOOL_FIELDS,
        *CHAT_NEUTRAL,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Generation):
    """POST /v1/completions.

    Attributes:
        generates: false when only the prompt is scored.
        suffix: the text that follows the completion.
    """

    prompts: list[Prompt]
    add_special_tokens: bool
    generates: bool
    suffix: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages in the form that chat templates take."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    tools: ToolUse = NO_TOOLS
    documents: list[dict[str, Any]] | None = None

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The tools that the template gets: all, or none where none may be called."""
        return () if self.tools.mode == "none" else self.tools.tools

    @property
    def template_input(self) -> TemplateInput:
        """What the chat template renders."""
        return TemplateInput(
            messages=[for_template(message) for message in self.messages],
            tools=[tool.form for tool in self.shown_tools] or None,
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
        )

    @property
    def calls(self) -> int:
        """Tool calls in the messages."""
        return sum(len(message.get("tool_calls", ())) for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Generation):
    """POST /v1/chat/completions, and what other endpoints of chats make of their bodies.

    Attributes:
        thinking_budget: tokens of reasoning after which it is ended; None sets no limit.
        include_reasoning: whether the reply has the reasoning.
    """

    conversation: Conversation
    thinking_budget: int | None = None
    include_reasoning: bool = True

    @property
    def tools(self) -> ToolUse:
        """The tools, and how the answer may use them."""
        return self.conversation.tools


def parse_completion(body: dict[str, Any], rules: Rules) -> CompletionRequest:
    """The typed request. Raises ApiError that names the field at fault."""
    scoring = body.get("echo") is True and is_one_of(body.get("max_tokens"), (0,))
    forced = {"max_tokens": 1} if scoring else {}
    shared = read_generation(body, rules, COMPLETION_NEUTRAL, {}, forced)
    refuse_unsupported(body, CHAT_ONLY, "/v1/chat/completions")
    params: SamplingParams = shared["params"]
    if shared["echo"] and params.logprobs is not None and params.use_beam_search:
        raise bad_request(
            "echo with logprobs cannot be combined with use_beam_search; leave one of them out",
            "echo",
        )
    suffix = read_optional(body, "suffix", str) or None
    if suffix is not None and body.get("prompt") == "":
        prompts: list[Prompt] = [""]
    else:
        prompts = read_prompts(body.get("prompt"), rules, params)
    if suffix is not None:
        check_suffix(suffix, prompts, params, shared["echo"], rules)
    check_choices(prompts, params)
    return CompletionRequest(
        **shared,
        prompts=prompts,
        add_special_tokens=read_field(body, "add_special_tokens", bool, True),
        generates=not scoring,
        suffix=suffix,
    )


def parse_chat(body: dict[str, Any], rules: Rules) -> ChatRequest:
    """The typed request. Raises ApiError that names the field at fault."""
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    read_field(body, "max_tokens", int, 0)  # checked even where it is unused
    shared = read_generation(
        body,
        rules,
        CHAT_NEUTRAL,
        names={"max_tokens": limit, "logprobs": "top_logprobs"},
        forced={"max_tokens": body.get(limit), "logprobs": read_chat_logprobs(body)},
    )
    refuse_unsupported(body, COMPLETION_ONLY, "/v1/completions")
    return ChatRequest(
        **shared,
        conversation=read_conversation(body, rules),
        thinking_budget=read_budget(body),
        include_reasoning=read_field(body, "include_reasoning", bool, True),
    )


def read_conversation(body: dict[str, Any], rules: Rules, answered: bool = True) -> Conversation:
    """The messages and how to render them: by default with the begin of a new answer if they are
    to be `answered` and none is continued. Raises ApiError."""
    truncated = body.get("truncate_prompt_tokens") is not None
    messages = read_messages(body.get("messages"), rules, truncated)
    if body.get("chat_template") is not None:
        raise bad_request(
            "chat_template is not accepted from clients; "
            "the server's operator chooses it with --chat-template",
            "chat_template",
        )
    kwargs = rules.template_kwargs | read_template_kwargs(body)
    continues = read_field(body, "continue_final_message", bool, False)
    prompts = read_field(body, "add_generation_prompt", bool, answered and not continues)
    if continues and prompts:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    return Conversation(
        messages=messages,
        add_generation_prompt=prompts,
        continue_final_message=continues,
        template_kwargs=kwargs,
        tools=read_tool_use(body),
        documents=read_documents(body, rules, truncated),
    )


def read_budget(body: dict[str, Any]) -> int | None:
    """`thinking_token_budget`. Raises ApiError."""
    budget = read_optional(body, "thinking_token_budget", int)
    if budget is not None and budget < 0:
        raise bad_request(
            f"thinking_token_budget must be at least 0, got {budget}", "thinking_token_budget"
        )
    return budget


def read_prompts(
    value: Any, rules: Rules, params: SamplingParams, field: str = "prompt"
) -> list[Prompt]:
    """The prompts of a completion, from the value of `field`. Token ids are truncated as requested
    and checked. Raises ApiError."""
    if value is None:
        raise bad_request(f"{field} is required: {PROMPT_FORMS}", field)
    if isinstance(value, str) or (
        isinstance(value, list) and value and not isinstance(value[0], (str, list))
    ):
        value = [value]
    if not isinstance(value, list):
        raise bad_request(
            f"{field} must be {PROMPT_FORMS}, got {describe(value)}",
            field,
        )
    if not value:
        raise bad_request(f"{field} must not be empty", field)
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"at most {MAX_PROMPTS} prompts per request, got {len(value)}", field)
    return [_read_prompt(prompt, type(value[0]), rules, params, field) for prompt in value]


def _read_prompt(
    prompt: Any, kind: type[Any], rules: Rules, params: SamplingParams, field: str
) -> Prompt:
    """One prompt, which must be of the same kind as the first."""
    if type(prompt) is not kind:
        raise bad_request(f"{field} must not mix texts and token ids", field)
    if not prompt:
        raise bad_request(f"{field} must not be empty", field)
    if isinstance(prompt, str):
        check_chars(len(prompt), rules, field, params.truncate_prompt_tokens is not None)
        return prompt
    ids: list[Any] = params.truncated(list(prompt), rules.resolved.max_model_len)
    return check_ids(ids, rules.resolved, field)


def read_chat_logprobs(body: dict[str, Any]) -> int | None:
    """The number in `top_logprobs` if `logprobs` is true, else None. Raises ApiError."""
    wanted = read_field(body, "logprobs", bool, False)
    top = read_optional(body, "top_logprobs", int)
    if top and not wanted:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return (top or 0) if wanted else None
