"""JSON schemas of the endpoints' bodies, from the tables that read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxllm.grammar.structure import KINDS
from jaxllm.messages import MAX_SALT
from jaxllm.pooling import TASKS
from jaxllm.server.anthropic import requests as anthropic
from jaxllm.server.native import requests as native
from jaxllm.server.openapi.schema import (
    ANY,
    BOOL,
    IDS,
    NULL,
    OBJECT,
    STRING,
    Schema,
    array,
    either,
    field,
    form,
    one_of,
    option,
    ref,
    unsupported,
)
from jaxllm.server.pooling import cohere
from jaxllm.server.pooling import requests as pooling
from jaxllm.server.pooling.scoring import SIDES
from jaxllm.server.requests.conversation import EFFORTS, MAX_DOCUMENTS, MAX_KWARGS
from jaxllm.server.requests.known_fields import (
    CHAT_NEUTRAL,
    CHAT_ONLY,
    COMPLETION_NEUTRAL,
    COMPLETION_ONLY,
    IGNORED,
    NEUTRAL,
)
from jaxllm.server.requests.limits import MAX_MESSAGES, MAX_PROMPTS
from jaxllm.server.requests.messages import ROLES
from jaxllm.server.requests.sampling import WIRE_OPTIONS
from jaxllm.server.requests.structure import GUIDED
from jaxllm.server.requests.tools import ALLOWED, MAX_TOOLS, MODES

TEXT: Schema = {"type": "string", "minLength": 1}
SCHEMA_OF_JSON: Schema = {"type": ["object", "boolean", "string"]}
STRUCTURES: dict[str, Schema] = {
    "json": SCHEMA_OF_JSON,
    "json_object": {"const": True},
    "regex": TEXT,
    "choice": array(TEXT, minItems=1),
    "grammar": TEXT,
    "structural_tag": either(OBJECT, STRING),
}
PROMPTS = either(
    TEXT,
    array(TEXT, minItems=1, maxItems=MAX_PROMPTS),
    IDS | {"minItems": 1},
    array(IDS | {"minItems": 1}, minItems=1, maxItems=MAX_PROMPTS),
)
IGNORED_FIELD = field(ANY, "Accepted, without effect.")


def ignored(names: Iterable[str]) -> dict[str, Schema]:
    """Fields that change nothing."""
    return dict.fromkeys(sorted(names), IGNORED_FIELD)


def refused(table: dict[str, tuple[Any, ...]]) -> dict[str, Schema]:
    """Fields of missing features."""
    return {name: unsupported(values) for name, values in table.items()}


SHARED: dict[str, Schema] = {
    "model": field(STRING, "A served name; may be left out when there is one."),
    "stream": field(BOOL, "Send events as tokens come.", default=False),
    "stream_options": field(
        form(
            include_usage=field(BOOL, "A last event with usage."),
            continuous_usage_stats=field(BOOL, "Usage in every event."),
            include_obfuscation=IGNORED_FIELD | {"type": ["boolean", "null"]},
        )
        | {"additionalProperties": False},
        "With stream alone.",
    ),
    **{name: option(name) for name in WIRE_OPTIONS},
    "cache_salt": field(
        {"type": "string", "minLength": 1, "maxLength": MAX_SALT, "pattern": r"^[^@/\\]+$"},
        "Only requests with an equal salt share cached prefixes.",
    ),
    "return_tokens_as_token_ids": field(BOOL, "Name tokens by their ids.", default=False),
    "return_token_ids": field(BOOL, "Return the ids of the prompt and of choices.", default=False),
    "echo": field(BOOL, "Repeat the prompt before the completion.", default=False),
    "response_format": field(ref("ResponseFormat"), "Constrains the output."),
    **dict.fromkeys(
        ("structured_outputs", "guided_decoding"),
        field(ref("StructuredOutputs"), "Constrains the output."),
    ),
    **{
        name: field(STRUCTURES[structure], f"The older name of structured_outputs.{structure}.")
        for name, structure in GUIDED.items()
    },
    "guided_json_object": field(BOOL, "The older name of structured_outputs.json_object."),
    "guided_whitespace_pattern": field(STRING, "With guided_json alone."),
    "kv_transfer_params": field(
        form(do_remote_decode=field(BOOL), do_remote_prefill=field(BOOL)),
        "Another server is to continue this prompt, or, as its answer said, has computed it.",
    ),
    **refused(NEUTRAL),
    **ignored(IGNORED),
}
CONVERSATION: dict[str, Schema] = {
    "messages": array(ref("Message"), minItems=1, maxItems=MAX_MESSAGES),
    "tools": field(array(ref("Tool"), maxItems=MAX_TOOLS), "Functions that the model may call."),
    "tool_choice": field(
        either(one_of(MODES), ref("NamedTool"), ref("AllowedTools")), "Whether a tool is called."
    ),
    "parallel_tool_calls": field(BOOL, "Whether an answer may have several calls.", default=True),
    **refused({name: CHAT_ONLY[name] for name in ("functions", "function_call", "chat_template")}),
    "chat_template_kwargs": field(
        OBJECT | {"maxProperties": MAX_KWARGS}, "Variables of the chat template."
    ),
    "documents": field(array(OBJECT, maxItems=MAX_DOCUMENTS), "For templates that read them."),
    "reasoning_effort": field(one_of(EFFORTS), "How much to think, where the template asks."),
    "thinking_token_budget": field({"type": "integer", "minimum": 0}, "Most tokens of thought."),
    "continue_final_message": field(BOOL, "Continue the last message.", default=False),
    "add_generation_prompt": field(BOOL, "Begin a new answer; default: unless one is continued."),
}
CHAT_MEMBERS: dict[str, Schema] = {
    **SHARED,
    **CONVERSATION,
    "logprobs": field(BOOL, "Return log-probabilities.", default=False),
    "top_logprobs": field(option("logprobs"), "How many at each token; -1: all."),
    "max_tokens": option("max_tokens") | {"default": None},
    "max_completion_tokens": option("max_tokens") | {"default": None},
    "include_reasoning": field(BOOL, "Keep reasoning in the reply.", default=True),
    **refused(CHAT_NEUTRAL),
    **refused(COMPLETION_ONLY),
}
COMPLETION_MEMBERS: dict[str, Schema] = {
    **SHARED,
    **refused(CHAT_ONLY),
    **refused(COMPLETION_NEUTRAL),
    "prompt": PROMPTS | {"description": "Texts or token ids."},
    "max_tokens": field({"type": "integer", "minimum": 0}, "0 with echo only scores.", default=16),
    "suffix": field(STRING, "The text after the completion, for tokenizers that have markers."),
    "add_special_tokens": field(BOOL, "Begin with the tokenizer's own tokens.", default=True),
}
BLOCKS = either(STRING, array(OBJECT))
MESSAGES_MEMBERS: dict[str, Schema] = {
    "model": SHARED["model"],
    "messages": array(ref("AnthropicMessage"), minItems=1),
    "system": field(BLOCKS, "A text, or blocks of text."),
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
    "stream": SHARED["stream"],
    **{name: option(name) for name in ("temperature", "top_p", "top_k")},
    "stop_sequences": field(option("stop")["anyOf"][0]["anyOf"][1], "Texts that end the answer."),
    "tools": field(array(ref("AnthropicTool"), maxItems=MAX_TOOLS), "Tools of the client."),
    "tool_choice": field(
        form(
            ["type"],
            type=one_of((*anthropic.CHOICES, "tool")),
            name=field(STRING),
            disable_parallel_tool_use=field(BOOL),
        ),
        "Whether a tool is called.",
    ),
    "thinking": field(
        form(
            ["type"],
            type=one_of(anthropic.THINKING),
            budget_tokens=field({"type": "integer", "minimum": 1}),
            display=field(one_of(("summarized", "omitted"))),
        ),
        "Whether and how long to think.",
    ),
    "output_config": field(form(effort=field(one_of(EFFORTS)), format=field(OBJECT))),
    "output_format": field(OBJECT, "The older name of output_config.format."),
    **refused(anthropic.NEUTRAL),
    **ignored(anthropic.IGNORED),
}
SGLANG_MEMBERS: dict[str, Schema] = {
    "text": field(either(TEXT, array(TEXT, minItems=1, maxItems=MAX_PROMPTS))),
    "input_ids": field(either(*PROMPTS["anyOf"][2:])),
    "sampling_params": field(OBJECT, "Sampling options under SGLang's names."),
    "stream": SHARED["stream"],
    **refused(native.NEUTRAL),
    **ignored(native.IGNORED),
    "model": SHARED["model"],
}
TOKENIZE_MEMBERS: dict[str, Schema] = {
    "model": SHARED["model"],
    "prompt": field(STRING, "A text; or send messages."),
    **CONVERSATION,
    "messages": field(CONVERSATION["messages"]),
    "add_special_tokens": COMPLETION_MEMBERS["add_special_tokens"],
    "return_token_strs": field(BOOL, "Also return the tokens' texts.", default=False),
    **refused({name: CHAT_NEUTRAL[name] for name in CHAT_NEUTRAL if name != "add_special_tokens"}),
}

POOLING_OPTIONS: dict[str, Schema] = {
    "model": SHARED["model"],
    "dimensions": field({"type": "integer", "minimum": 1}, "Cut the vector, where the model may."),
    **dict.fromkeys(
        ("use_activation", "normalize", "activation"),
        field(BOOL, "Vectors of length one, classes as probabilities; default: the model's."),
    ),
    "truncate_prompt_tokens": field(
        {"type": "integer", "minimum": -1}, "Tokens to keep; -1: as many as the model takes."
    ),
    "truncation_side": field(one_of(("right", "left")), "Where the others are cut off."),
    "priority": option("priority"),
    "cache_salt": SHARED["cache_salt"],
    **refused(pooling.NEUTRAL),
    **ignored(pooling.IGNORED),
}
INPUTS = either(*PROMPTS["anyOf"])
TEXTS = either(STRING, array(either(STRING, form(["text"], text=STRING)), minItems=1))
INPUT_MEMBERS: dict[str, Schema] = {
    **{name: TOKENIZE_MEMBERS[name] for name in sorted(pooling.CONVERSATION_FIELDS)},
    **POOLING_OPTIONS,
    "input": field(INPUTS, "Texts or token ids; or send messages."),
    "messages": field(CONVERSATION["messages"]),
    "encoding_format": field(one_of(pooling.ENCODINGS), "Of vectors.", default="float"),
    "embed_dtype": field(one_of(pooling.EMBED_DTYPES), "Of their numbers.", default="float32"),
    "endianness": field(one_of(pooling.ENDIANNESS), "Of base64 and bytes.", default="native"),
    "add_special_tokens": field(BOOL, "Texts get the tokenizer's own tokens.", default=True),
    "task": field(one_of(TASKS), "With /pooling alone."),
}

FUNCTION = form(
    ["name"],
    name={"type": "string", "pattern": r"^[\w.:/-]{1,128}$"},
    description=field(STRING),
    parameters=field(OBJECT, "JSON schema of the arguments."),
    strict=field(BOOL),
)
BODIES: dict[str, Schema] = {
    "CompletionRequest": form(["prompt"], **COMPLETION_MEMBERS),
    "ChatRequest": form(["messages"], **CHAT_MEMBERS),
    "MessagesRequest": form(["messages", "max_tokens"], **MESSAGES_MEMBERS),
    "CountTokensRequest": form(["messages"], **MESSAGES_MEMBERS | {"max_tokens": IGNORED_FIELD}),
    "GenerateRequest": either(
        form(["prompt"], **COMPLETION_MEMBERS | refused(dict.fromkeys(native.TEXT_ALONE, ()))),
        form(**SGLANG_MEMBERS),
    ),
    "TokenizeRequest": form(**TOKENIZE_MEMBERS),
    "InputRequest": form(**INPUT_MEMBERS),
    "EmbedRequest": form(
        model=SHARED["model"],
        input_type=field(STRING, "A type of inputs that the model has a text for."),
        texts=field(array(STRING, minItems=1, maxItems=MAX_PROMPTS), "Or send inputs."),
        inputs=field(array(ref("EmbedInput"), minItems=1, maxItems=MAX_PROMPTS)),
        images=unsupported(()),
        output_dimension=POOLING_OPTIONS["dimensions"],
        embedding_types=field(array(one_of(cohere.TYPES)), "Default: float."),
        truncate=field(one_of(cohere.TRUNCATE), "Where long inputs are cut.", default="END"),
        max_tokens=field({"type": "integer", "minimum": 1}, "Tokens of an input."),
        priority=option("priority"),
    ),
    "EmbedInput": form(
        ["content"],
        content=array(form(["type", "text"], type={"const": "text"}, text=STRING), minItems=1),
    ),
    "ScoreRequest": form(
        **POOLING_OPTIONS, **{name: field(TEXTS) for pair in SIDES for name in pair}
    ),
    "RerankRequest": form(
        ["query", "documents"],
        **POOLING_OPTIONS,
        query=STRING,
        documents=TEXTS,
        top_n=field({"type": "integer", "minimum": 0}, "Best documents to return; 0: all."),
        max_tokens_per_doc=field({"type": "integer", "minimum": 0}, "Tokens that are read of one."),
        return_documents=IGNORED_FIELD,
    ),
    "UpdateWeights": form(["path"], path=STRING),
    "DetokenizeRequest": form(["tokens"], model=SHARED["model"], tokens=IDS),
    "Message": form(
        ["role"],
        role=one_of(ROLES),
        content=either(STRING, NULL, array(OBJECT)),
        name=field(STRING),
        tool_call_id=field(STRING),
        tool_calls=field(array(OBJECT)),
        reasoning=field(STRING),
        reasoning_content=field(STRING),
    ),
    "Tool": form(["type", "function"], type={"const": "function"}, function=FUNCTION),
    "NamedTool": form(
        ["function"], type={"const": "function"}, function=form(["name"], name=STRING)
    ),
    "AllowedTools": form(
        ["type", ALLOWED],
        type={"const": ALLOWED},
        allowed_tools=form(
            ["mode", "tools"], mode=one_of(("auto", "required")), tools=array(ref("NamedTool"))
        ),
    ),
    "AnthropicMessage": form(
        ["role", "content"], role=one_of(("user", "assistant", "system")), content=BLOCKS
    ),
    "AnthropicTool": form(
        ["name", "input_schema"],
        type=field(one_of(("custom",))),
        name=FUNCTION["properties"]["name"],
        description=field(STRING),
        input_schema=OBJECT,
        strict=field(BOOL),
    ),
    "StructuredOutputs": form(
        **{name: field(STRUCTURES[name]) for name in KINDS},
        whitespace_pattern=field(STRING),
        disable_any_whitespace=field(BOOL),
        disable_fallback=field(BOOL),
    ),
    "ResponseFormat": form(
        ["type"],
        type=one_of(("text", "json_object", "json_schema", "structural_tag")),
        json_schema=field(form(["name", "schema"], name=STRING, schema=SCHEMA_OF_JSON)),
    ),
}
