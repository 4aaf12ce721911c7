"""What the bodies of pooling routes have in common: inputs, options, and texts to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jaxllm.messages import RequestError
from jaxllm.pooled import PoolingParams, check_params, check_task
from jaxllm.pooling import Pooling
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.values import OptionError
from jaxllm.server.errors import bad_request, describe
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.conversation import Conversation, read_conversation
from jaxllm.server.requests.fields import read_field, read_optional
from jaxllm.server.requests.generation import read_salt
from jaxllm.server.requests.known_fields import TOKENIZE_FIELDS, refuse_unsupported
from jaxllm.server.requests.limits import MAX_PROMPTS, Rules, check_chars, check_vocabulary
from jaxllm.server.requests.model_name import read_model

# Fields that are not supported, with the values that request nothing
OF_INPUTS: dict[str, tuple[Any, ...]] = {"mm_processor_kwargs": ({},), "data": ()}
OF_BYTES: dict[str, tuple[Any, ...]] = {  # of what gives numbers
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # of what compares texts
    **OF_BYTES,
    "add_special_tokens": (True,),
    **OF_INPUTS,
}
# How vectors are written, the types of their numbers, and the order of the bytes of these
ENCODINGS = ("float", "base64", "bytes", "bytes_only")
EMBED_DTYPES: Mapping[str, DTypeLike] = MappingProxyType(
    {
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
        "fp8_e4m3": ml_dtypes.float8_e4m3fn,
        "fp8_e5m2": ml_dtypes.float8_e5m2,
    }
)
ENDIANNESS: Mapping[str, str] = MappingProxyType({"native": "<", "little": "<", "big": ">"})
IGNORED = frozenset({"user", "request_id"})
OPTIONS = frozenset(
    "model dimensions use_activation normalize activation truncate_prompt_tokens truncation_side "
    "priority cache_salt".split()
)
SHARED_FIELDS = OPTIONS | IGNORED | NEUTRAL.keys()
# Bodies with inputs or a conversation
CONVERSATION_FIELDS = TOKENIZE_FIELDS - {"prompt", "return_token_strs"}
INPUT_FIELDS = SHARED_FIELDS | CONVERSATION_FIELDS | {"input", "encoding_format", "task"}
INPUT_BODY = BodyFields(sizes={"input": None, "messages": None, "documents": None})
MAX_DESCRIBED = 400  # inputs: clients take headers of 64 KiB
INPUT_FORMS = "a text, a list of texts, token ids, or a list of token id lists"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a pooling request.

    Attributes:
        pooling: what the model does.
        engine: what the engine reads of them.
    """

    model: str
    pooling: Pooling
    params: PoolingParams
    engine: SamplingParams
    cache_salt: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How vectors are written.

    Attributes:
        encoding: one of `ENCODINGS`.
        dtype: one of `EMBED_DTYPES`, to which numbers are rounded.
        endianness: one of `ENDIANNESS`, the order of bytes.
    """

    encoding: str = "float"
    dtype: str = "float32"
    endianness: str = "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRequest:
    """A request with inputs, or with a conversation in their place.

    Attributes:
        special: whether texts get the tokenizer's own tokens.
    """

    options: Options
    inputs: list[str | list[int]]
    conversation: Conversation | None
    form: Form = Form()
    special: bool = True


def read_options(
    body: dict[str, Any],
    rules: Rules,
    *tasks: str,
    neutral: dict[str, tuple[Any, ...]] = NEUTRAL,
) -> Options:
    """The options of a request to a model that does one of `tasks`; the fields of `neutral` may say
    nothing else. Raises ApiError."""
    model = read_model(body, rules.served, required=False)
    refuse_unsupported(body, neutral)
    activation = [
        read_optional(body, name, bool) for name in ("use_activation", "normalize", "activation")
    ]
    params = PoolingParams(
        dimensions=read_optional(body, "dimensions", int),
        use_activation=next((flag for flag in activation if flag is not None), None),
        truncate_prompt_tokens=read_optional(body, "truncate_prompt_tokens", int),
        truncation_side=read_field(body, "truncation_side", str, "right"),
    )
    priority = read_field(body, "priority", int, 0)
    if priority and rules.resolved.scheduling_policy != "priority":
        raise bad_request(
            "priority needs a server with --scheduling-policy priority; leave it out", "priority"
        )
    try:
        pooling = check_task(rules.resolved.pooling, *tasks)
        check_params(pooling, params, rules.resolved.max_model_len)
        engine = SamplingParams(max_tokens=1, priority=priority)
    except (RequestError, OptionError) as error:
        code = getattr(error, "code", None)
        raise bad_request(str(error), error.param, code) from None
    return Options(
        model=model, pooling=pooling, params=params, engine=engine, cache_salt=read_salt(body)
    )


def read_inputs(body: dict[str, Any], rules: Rules, *tasks: str) -> InputRequest:
    """`input` or `messages`, with the options. Raises ApiError."""
    options = read_options(body, rules, *tasks, neutral=OF_INPUTS)
    form = Form(
        encoding=one_of(body, "encoding_format", ENCODINGS),
        dtype=one_of(body, "embed_dtype", tuple(EMBED_DTYPES)),
        endianness=one_of(body, "endianness", tuple(ENDIANNESS)),
    )
    special = read_field(body, "add_special_tokens", bool, True)
    if body.get("messages") is None:
        inputs = _input_list(body.get("input"), rules, options.params)
        conversation = None
    elif body.get("input") is None:
        inputs = []
        conversation = read_conversation(body, rules, answered=False)
    else:
        raise bad_request("input and messages exclude each other; send one of them", "input")
    if form.encoding == "bytes" and len(inputs) > MAX_DESCRIBED:
        raise bad_request(
            f"a header describes the bytes of at most {MAX_DESCRIBED} inputs, got {len(inputs)}; "
            "send fewer, or ask for bytes_only",
            "encoding_format",
        )
    return InputRequest(
        options=options, inputs=inputs, conversation=conversation, form=form, special=special
    )


def one_of(body: dict[str, Any], name: str, legal: tuple[str, ...]) -> str:
    """A field's value, by default the first. Raises ApiError."""
    value = read_field(body, name, str, legal[0])
    if value not in legal:
        raise bad_request(f"{name} must be {' or '.join(legal)}, got {describe(value)}", name)
    return value


def read_texts(value: Any, rules: Rules, field: str, cut: bool) -> list[str]:
    """Texts from the value of a field: one, or a list of texts and objects with a text. They may be
    longer than the model takes if they are `cut`. Raises ApiError."""
    values = value if isinstance(value, list) else [value]
    if not values or len(values) > MAX_PROMPTS:
        raise bad_request(f"{field} must hold 1 to {MAX_PROMPTS} texts, got {len(values)}", field)
    texts: list[str] = []
    for entry in values:
        if isinstance(entry, dict):
            text = entry.get("text")
        else:
            text = entry
        if not isinstance(text, str):
            raise bad_request(f"{field} must hold texts, got {describe(text)}", field)
        check_chars(len(text), rules, field, cut)
        texts.append(text)
    return texts


def _input_list(value: Any, rules: Rules, params: PoolingParams) -> list[str | list[int]]:
    """The inputs, from any of their forms."""
    if value is None:
        raise bad_request(f"input is required: {INPUT_FORMS}", "input")
    if isinstance(value, str) or (
        isinstance(value, list) and value and not isinstance(value[0], (str, list))
    ):
        value = [value]
    if not isinstance(value, list):
        raise bad_request(f"input must be {INPUT_FORMS}, got {describe(value)}", "input")
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise bad_request(f"input must hold 1 to {MAX_PROMPTS} inputs, got {len(value)}", "input")
    return [_input(element, type(value[0]), rules, params) for element in value]


def _input(
    value: Any, value_type: type[Any], rules: Rules, params: PoolingParams
) -> str | list[int]:
    """One input, which must be of the same kind as the first."""
    if type(value) is not value_type:
        raise bad_request("input must not mix texts and token ids", "input")
    if not value:
        raise bad_request("input must not be empty", "input", "empty_prompt")
    if isinstance(value, str):
        check_chars(len(value), rules, "input", params.truncate_prompt_tokens is not None)
        return value
    ids = params.truncated(value, rules.resolved.max_model_len)
    return check_vocabulary(ids, rules.resolved, "input")
