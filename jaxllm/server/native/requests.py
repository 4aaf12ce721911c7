"""Bodies of /generate to typed requests: vLLM's demo form and SGLang's native form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from jaxllm.sampling.options import OPTIONS
from jaxllm.server.errors import bad_request, describe
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.completion import CompletionRequest, parse_completion, read_prompts
from jaxllm.server.requests.fields import read_field, whole
from jaxllm.server.requests.generation import read_generation
from jaxllm.server.requests.known_fields import COMPLETION_FIELDS, refuse_unsupported
from jaxllm.server.requests.known_fields import IGNORED as NO_EFFECT
from jaxllm.server.requests.limits import Rules, check_choices
from jaxllm.server.requests.sampling import NOT_ON_THE_WIRE, WIRE_OPTIONS
from jaxllm.server.requests.structure import STRUCTURE_FIELDS

# SGLang's names of sampling options
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
}
# SGLang's names of constraints
STRUCTURES = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
MAX_NEW_TOKENS = 128  # SGLang's default

# Fields of SGLang that are not supported, with the values that request nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        "input_embeds image_data audio_data video_data lora_path token_ids_logprob "
        "custom_logit_processor session_params".split(),
        (),
    ),
    **dict.fromkeys(
        ("return_logprob", "return_hidden_states", "return_text_in_logprobs"), (False,)
    ),
    **dict.fromkeys(("top_logprobs_num", "priority"), (0,)),  # higher goes first there
    "logprob_start_len": (-1,),
    "modalities": ([],),
}
# Those that mean nothing in vLLM's form
SGLANG_ALONE = {name: neutral for name, neutral in NEUTRAL.items() if name != "priority"}
IGNORED = frozenset({"rid", "log_metrics"})
SGLANG_FIELDS = frozenset(
    {"text", "input_ids", "sampling_params", "model", "stream", *NEUTRAL, *IGNORED}
)
# Options of vLLM's form; SGLang's own `priority` aside
BESIDE_PROMPT = tuple(name for name in (*WIRE_OPTIONS, *STRUCTURE_FIELDS) if name != "priority")
# Fields about what vLLM's form leaves out of its reply
TEXT_ALONE = ("logprobs", "prompt_logprobs", "stream_options", "echo", "return_token_ids")
# Fields of completions that SGLang's form has no place for
COMPLETIONS_ALONE = sorted(
    COMPLETION_FIELDS - SGLANG_FIELDS - NO_EFFECT - {"prompt", *BESIDE_PROMPT}
)
NATIVE_FIELDS = COMPLETION_FIELDS | SGLANG_FIELDS
NATIVE_BODY = BodyFields(
    sizes={"text": None, "input_ids": None}, prompts=frozenset({"text", "input_ids"})
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRequest(CompletionRequest):
    """POST /generate.

    Attributes:
        sglang: the reply has SGLang's form, else vLLM's.
        batch: the prompts came as a list, so the reply is one.
    """

    sglang: bool
    batch: bool


def parse_native(body: dict[str, Any], rules: Rules) -> NativeRequest:
    """The typed request. Raises ApiError that names the field at fault."""
    sent = [name for name in ("prompt", "text", "input_ids") if body.get(name) is not None]
    if len(sent) != 1:
        raise bad_request(
            "send one of prompt (vLLM's form), text and input_ids (SGLang's form), "
            f"got {' and '.join(sent) or 'none'}",
            sent[1] if sent else "prompt",
        )
    if sent == ["prompt"]:
        return _parse_vllm(body, rules)
    return _parse_sglang(body, sent[0], rules)


def _parse_vllm(body: dict[str, Any], rules: Rules) -> NativeRequest:
    """Sampling options beside `prompt`; the reply repeats the prompt, so there is one."""
    _refuse(body, ("sampling_params",), "send options beside prompt")
    _refuse(body, TEXT_ALONE, "the reply is text alone; send the request to /v1/completions")
    refuse_unsupported(body, SGLANG_ALONE)
    model = body.get("model") or rules.served[0]
    completion = parse_completion(body | {"model": model}, rules)
    prompts = completion.prompts
    if len(prompts) != 1:
        raise bad_request(f"prompt must be one prompt here, got {len(prompts)}", "prompt")
    return NativeRequest(
        generation=replace(completion.generation, echo=True),
        prompts=prompts,
        add_special_tokens=completion.add_special_tokens,
        generates=completion.generates,
        suffix=completion.suffix,
        sglang=False,
        batch=False,
    )


def _parse_sglang(body: dict[str, Any], field: str, rules: Rules) -> NativeRequest:
    """Sampling options within `sampling_params`; the prompts are in `field`."""
    refuse_unsupported(body, NEUTRAL)
    _refuse(body, BESIDE_PROMPT, "send it within sampling_params")
    _refuse(body, COMPLETIONS_ALONE, "send the request to /v1/completions")
    options = _options(read_field(body, "sampling_params", dict, {}))
    names = {name: name for name in OPTIONS} | {name: theirs for theirs, name in NAMES.items()}
    generation = read_generation(
        options
        | {
            "model": body.get("model") or rules.served[0],
            "stream": read_field(body, "stream", bool, False),
        },
        rules,
        neutral={},
        names={name: f"sampling_params.{theirs}" for name, theirs in names.items()},
        forced={"max_tokens": options.get("max_tokens", MAX_NEW_TOKENS), "logprobs": None},
    )
    prompts = read_prompts(body[field], rules, generation.params, field)
    if isinstance(prompts[0], str) != (field == "text"):
        raise bad_request("text takes texts, input_ids takes token ids", field)
    check_choices(prompts, generation.params)
    return NativeRequest(
        generation=replace(generation, returns_token_ids=True),
        prompts=prompts,
        add_special_tokens=True,
        generates=True,
        suffix=None,
        sglang=True,
        batch=isinstance(body[field], list) and isinstance(body[field][0], (str, list)),
    )


def _refuse(body: dict[str, Any], names: Iterable[str], remedy: str) -> None:
    """Raise ApiError(400) on a field of the other form."""
    for name in names:
        if body.get(name) is not None:
            raise bad_request(f"{name} has no effect in this form of /generate; {remedy}", name)


def _options(sampling: dict[str, Any]) -> dict[str, Any]:
    """SGLang's sampling parameters under the names of this server."""
    options: dict[str, Any] = {}
    structure = {}
    for name, value in sampling.items():
        if value is None:
            continue
        if name == "json_schema":
            structure[STRUCTURES[name]] = _schema(name, value)
        elif name in STRUCTURES:
            structure[STRUCTURES[name]] = value
        elif name in OPTIONS and name not in NOT_ON_THE_WIRE:
            options[name] = value
        elif name in NAMES:
            options[NAMES[name]] = whole(value)
        elif name == "structural_tag":
            structure[name] = _schema(name, value)
        else:
            raise bad_request(
                f"sampling_params.{name[:64]} is not supported; leave it out",
                f"sampling_params.{name[:64]}",
                "unsupported_parameter",
            )
    if structure:
        options["structured_outputs"] = structure
    return options


def _schema(name: str, value: Any) -> Any:
    """A schema, which SGLang takes as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        raise bad_request(
            f"sampling_params.{name} must be JSON, got {describe(value)}",
            f"sampling_params.{name}",
        ) from None
