"""From the sampling that a client wishes to the sampling that runs. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.config import Resolved
from jaxllm.messages import RequestError
from jaxllm.sampling.options import OPTIONS, SamplingParams
from jaxllm.sampling.values import OptionError, checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """What a front end adds to a client's wishes for one prompt.

    Attributes:
        scores_prompt: whether tokens of the prompt get as many log-probabilities as those of the
            output, which an echo shows.
        stop_token_ids: tokens that end the output too, such as those before a suffix.
        shows_special_tokens: whether special tokens stay in the text, where a parser reads them.
        is_compiled: whether `structured_outputs` has become the request's grammar.
        seed: of the draws, where the client wishes none.
    """

    scores_prompt: bool = False
    stop_token_ids: tuple[int, ...] = ()
    shows_special_tokens: bool = False
    is_compiled: bool = False
    seed: int | None = None


NO_ADDITIONS = Additions()


def prepared(
    wishes: SamplingParams,
    resolved: Resolved,
    prompt_tokens: int,
    additions: Additions = NO_ADDITIONS,
) -> SamplingParams:
    """The sampling that runs for a prompt of so many tokens: lengths within the context, and a
    number of log-probabilities in place of -1.

    It is `wishes` itself where nothing differs, so what is prepared may be prepared again. Raises
    RequestError that names the option for which the engine or a slot has no place.
    """
    # A prompt as long as the context is refused elsewhere
    rest = max(1, resolved.max_model_len - prompt_tokens)
    values: dict[str, Any] = {
        "max_tokens": min(wishes.max_tokens or rest, rest),
        "min_tokens": min(wishes.min_tokens, rest),
        "logprobs": count_logprobs(wishes, "logprobs", resolved),
        "prompt_logprobs": count_logprobs(wishes, "prompt_logprobs", resolved),
    }
    if additions.scores_prompt:
        values["prompt_logprobs"] = max(values["logprobs"] or 0, values["prompt_logprobs"] or 0)
    if additions.stop_token_ids:
        values["stop_token_ids"] = _joined_stops(wishes, additions.stop_token_ids)
    if additions.shows_special_tokens:
        values["skip_special_tokens"] = False
    if additions.is_compiled:
        values["structured_outputs"] = None
    if wishes.seed is None:
        values["seed"] = additions.seed
    changes = {name: value for name, value in values.items() if value != getattr(wishes, name)}
    if changes:
        return _changed(wishes, changes)
    return wishes


def count_logprobs(wishes: SamplingParams, name: str, resolved: Resolved) -> int | None:
    """How many of the most likely tokens the option `name` asks for: all of the vocabulary for -1,
    None where nothing is asked for. Raises RequestError above --max-logprobs."""
    wish: int | None = getattr(wishes, name)
    if wish is None:
        return None
    size = resolved.vocab_size
    count = size if wish < 0 else wish
    if count > resolved.max_logprobs:
        if wish < 0:
            shown = f"-1, the whole vocabulary of {size} tokens"
        else:
            shown = str(wish)
        raise RequestError(
            f"{name} must be at most {resolved.max_logprobs} (--max-logprobs), got {shown}", name
        )
    return count


def _joined_stops(wishes: SamplingParams, more: tuple[int, ...]) -> list[int]:
    """The wished stop tokens and `more`, sorted. Raises RequestError when a slot cannot hold all
    of them."""
    name = "stop_token_ids"
    joined = sorted({*(wishes.stop_token_ids or ()), *more})
    try:
        return list(checked(name, OPTIONS[name], joined))
    except OptionError as error:
        raise RequestError(str(error), name) from None


def _changed(wishes: SamplingParams, changes: dict[str, Any]) -> SamplingParams:
    """`wishes` with other values, which are legal. Nothing is checked again: lists may be long, and
    there may be many prompts."""
    params = object.__new__(SamplingParams)
    vars(params).update(vars(wishes) | changes)
    return params
