"""Checks and normalises the arguments of `LLM`'s methods. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from jaxllm.config import NEUTRAL_ARGUMENTS, ConfigError, EngineConfig, check_neutral
from jaxllm.messages import RequestError
from jaxllm.sampling.options import BeamSearchParams, SamplingParams

type PromptType = str | Sequence[int] | Mapping[str, Any]
type Message = Mapping[str, Any]

# With the usual types first: those of abc take long to ask
MAPPINGS = (dict, Mapping)
ITERABLES = (list, Iterable)


def engine_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The EngineConfig fields among vLLM's LLM arguments. Raises ConfigError on an unknown one, or
    on a value that would be ignored."""
    known = {f.name for f in fields(EngineConfig)}
    out = {}
    for name, value in arguments.items():
        if name in known:
            out[name] = value
        elif name not in NEUTRAL_ARGUMENTS:
            raise ConfigError(f"LLM has no argument {name!r}")
        else:
            check_neutral(name, value, f"{name}={value!r}")
    if out.get("nnodes", 1) != 1:
        raise ConfigError("LLM runs on one host; serve a model that several hosts run together")
    return out


def as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt or several, as a list. Raises RequestError."""
    if not isinstance(prompts, list) and isinstance(prompts, (str, *MAPPINGS)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, ITERABLES):
        raise RequestError(
            "prompts must be text, token ids, dicts or a list of them, "
            f"got {type(prompts).__name__}",
            "prompt",
        )
    if hasattr(prompts, "tolist"):
        items = prompts.tolist()
    else:
        items = list(prompts)
    if not isinstance(items, list):
        raise RequestError(
            "prompts must be text, token ids, dicts or a list of them, "
            f"got one number, {items!r:.80}",
            "prompt",
        )
    if items and isinstance(items[0], (int, np.integer)):
        return [items]
    return items


def text_or_ids(prompt: PromptType) -> tuple[str | None, list[int] | None]:
    """A prompt's text and its token ids, None for one that is not given. Raises RequestError."""
    if isinstance(prompt, MAPPINGS):
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), token_ids(prompt["prompt_token_ids"])
        if "prompt" not in prompt:
            raise RequestError(
                "a prompt given as a dict needs prompt or prompt_token_ids", "prompt"
            )
        prompt = prompt["prompt"]
    if not isinstance(prompt, str):
        return None, token_ids(prompt)
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise RequestError(
            "the prompt holds half of a surrogate pair, which is no text", "prompt"
        ) from None
    return prompt, None


def cache_salt(prompt: PromptType) -> str | None:
    """The salt of a prompt that is a dict."""
    if isinstance(prompt, MAPPINGS):
        return prompt.get("cache_salt")
    return None


def token_ids(ids: Any) -> list[int]:
    """Token ids from a list, tuple or array; the engine checks each. Raises RequestError on
    anything else."""
    if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, ITERABLES):
        raise RequestError(
            f"a prompt must be text or token ids, got {type(ids).__name__}", "prompt"
        )
    if hasattr(ids, "tolist"):
        tokens = ids.tolist()
    else:
        tokens = list(ids)
    if tokens and isinstance(tokens[0], np.integer):
        return np.asarray(tokens).tolist()
    return tokens


def params_of(
    sampling_params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """The params of `count` prompts, from one or one each. Raises RequestError or OptionError."""
    if not isinstance(sampling_params, (SamplingParams, Sequence)):
        raise RequestError(
            "sampling_params must be SamplingParams, one or one for each prompt, "
            f"got {type(sampling_params).__name__}",
            "sampling_params",
        )
    if isinstance(sampling_params, SamplingParams):
        params = [sampling_params] * count
    else:
        params = list(sampling_params)
    if len(params) != count:
        raise RequestError(
            f"{count} prompts but {len(params)} sampling_params; give one, or one for each prompt",
            "sampling_params",
        )
    for entry in {id(p): p for p in params}.values():
        if not isinstance(entry, SamplingParams):
            raise RequestError(
                f"sampling_params must be SamplingParams, got {type(entry).__name__}",
                "sampling_params",
            )
    return params


def with_priorities(params: list[SamplingParams], priority: Sequence[int]) -> list[SamplingParams]:
    """The params with one priority each. Raises RequestError."""
    if len(priority) != len(params):
        raise RequestError(
            f"{len(params)} prompts but {len(priority)} priorities; give one for each prompt",
            "priority",
        )
    return [replace(p, priority=rank) for p, rank in zip(params, priority, strict=True)]


def check_beam_arguments(params: Any, concurrency_limit: Any) -> None:
    """Raises RequestError on arguments of `LLM.beam_search` of wrong types or ranges."""
    if not isinstance(params, BeamSearchParams):
        raise RequestError(
            f"params must be BeamSearchParams, got {type(params).__name__}", "params"
        )
    if concurrency_limit is not None and (
        type(concurrency_limit) is not int or concurrency_limit < 1
    ):
        raise RequestError(
            f"concurrency_limit must be a whole number from 1, got {concurrency_limit!r:.80}",
            "concurrency_limit",
        )


def conversations_of(messages: Any) -> list[Any]:
    """One conversation or several, as a list. Raises RequestError unless each message has a role
    and content that is text: a template might drop anything else silently."""
    single = isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping)
    if single or not _is_list(messages):
        conversations = [messages]
    else:
        conversations = list(messages)
    for conversation in conversations:
        check_conversation(conversation)
    return conversations


def check_conversation(messages: Any) -> None:
    """Raises RequestError unless each message has a role and text."""
    if not _is_list(messages):
        raise RequestError(
            "a conversation must be a list of messages, each a dict with role and content",
            "messages",
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"message {index} must be a dict with a role and content, got {message!r:.80}",
                "messages",
            )
        content = message.get("content")
        if isinstance(content, Sequence) and not isinstance(content, str):
            parts = content
        else:
            parts = ()
        wrong = [
            part
            for part in parts
            if not (isinstance(part, Mapping) and isinstance(part.get("text"), str))
        ]
        if wrong or not (content is None or isinstance(content, (str, Sequence))):
            shown = f"{wrong[0] if wrong else content!r}"
            raise RequestError(
                f"the content of message {index} must be text, or a list of parts with text, "
                f"got {shown:.80}",
                "messages",
            )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
