"""The known fields of completions, of chats and of what is tokenised alone, and the values by which
fields of the one request nothing of the other."""

from __future__ import annotations

from typing import Any

from jaxllm.server.errors import bad_request
from jaxllm.server.requests.fields import is_one_of
from jaxllm.server.requests.sampling import WIRE_OPTIONS
from jaxllm.server.requests.structure import STRUCTURE_FIELDS

# Known fields that change nothing here, whatever they hold.
IGNORED = frozenset(
    "user metadata store service_tier prompt_cache_key prompt_cache_retention "
    "safety_identifier request_id session_id verbosity "
    "guided_decoding_backend".split()
)

# Fields of features that are not supported yet, with the values that request nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "prompt_embeds": ([],),
    "vllm_xargs": ({},),
    "extra_args": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "watermarking": (),
    "return_prompt_text": (False,),
    "truncation_side": ("left",),
    **dict.fromkeys(("beam_width", "json_schema"), ()),
    **dict.fromkeys(("regex", "ebnf", "grammar"), ("",)),
}

# Fields of other servers, or of the other endpoint, with their names here.
OTHER_NAMES = {
    "beam_width": "use_beam_search with best_of",
    **dict.fromkeys(("regex", "ebnf", "grammar", "json_schema"), "structured_outputs"),
    "top_logprobs": "logprobs",
    "max_completion_tokens": "max_tokens",
}

# Chat fields of features that are not supported yet, with the values that request nothing.
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "modalities": (["text"],),
    "mm_processor_kwargs": ({},),
    "add_special_tokens": (False,),
}

# Fields of tools, with the values that request nothing.
TOOL_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "parallel_tool_calls": (True, False),
}

# Fields of chats alone, with the values that request nothing.
CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "messages": ([],),
    **{name: neutral for name, neutral in CHAT_NEUTRAL.items() if name != "add_special_tokens"},
    **TOOL_FIELDS,
    **dict.fromkeys(("chat_template", "reasoning_effort", "thinking_token_budget"), ()),
    "include_reasoning": (True, False),
    "documents": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True, False),
}

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


def refuse_unsupported(
    body: dict[str, Any], table: dict[str, tuple[Any, ...]], elsewhere: str | None = None
) -> None:
    """Raise ApiError(400) on the first field of `table` that requests something; `elsewhere` names
    the endpoint that supports it."""
    for name, neutral in table.items():
        value = body.get(name)
        if value is not None and not is_one_of(value, neutral):
            remedy = "yet; leave it out"
            if elsewhere is not None:
                remedy = f"here, but in {elsewhere}; leave it out"
            if name in OTHER_NAMES:
                remedy = f"here; send {OTHER_NAMES[name]}"
            raise bad_request(f"{name} is not supported {remedy}", name, "unsupported_parameter")
