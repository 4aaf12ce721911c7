"""Every sampling option, once: default, legal range, neutral value, documentation. Imports no jax.

`SamplingParams` is a dataclass whose field metadata is the table. Validation, the wire schema, `--help=sampling` and the README's table
read it from `OPTIONS`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from jaxllm.grammar.structure import KINDS, GuidedDecodingParams, StructuredOutputsParams, StructureError, structure

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 2**14  # of all together: the engine makes tokens of them between two steps
MAX_PROCESSORS = 16
MAX_ARGUMENTS = 256
MAX_ALLOWED = 2**18  # as many as the largest vocabularies have
WITH_BEAMS = frozenset(
    "n best_of use_beam_search length_penalty early_stopping temperature seed max_tokens min_tokens stop_token_ids ignore_eos logprobs "
    "include_stop_str_in_output detokenize skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens priority".split()
)  # options that mean something in a beam search, or are there for every request


class OptionError(ValueError):
    """A sampling option has an illegal or unsupported value; `param` names it."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table. `low`/`high` bound numbers (`open_low`: exclusive); `kind` is float, int, bool, strings (or
    one), texts (strings in a list), ints, biases (a number for each of some token ids), processors, arguments, structure
    (grammar.structure) or stopping (true, false or "never")."""

    kind: str
    doc: str
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    nullable: bool = False
    max_items: int = 0
    low_items: int = 0
    also: tuple[Any, ...] = ()  # legal values outside the range, e.g. top_k = -1
    neutral: tuple[Any, ...] = ()  # values that ask for nothing


def option(kind: str, default: Any, doc: str, **row: Any) -> Any:
    """A dataclass field that carries its row of the table."""
    row.setdefault("neutral", (default,))
    return field(default=default, metadata={"option": Option(kind, doc, nullable=row.pop("nullable", default is None), **row)})


@dataclass(kw_only=True)
class SamplingParams:
    """How to sample one request; names and defaults are vLLM's. Raises `OptionError` on an illegal or unsupported value."""

    n: int = option("int", 1, "How many choices to generate from the prompt.", low=1, high=MAX_N)
    best_of: int | None = option("int", None, "Generate so many choices and return the n most likely ones; null = n.", low=1, high=MAX_N)
    temperature: float = option("float", 1.0, "Divides the logits; 0 picks the most likely token.", low=0, high=2)
    top_p: float = option("float", 1.0, "Keep the smallest set of tokens whose probability reaches this.", low=0, high=1, open_low=True)
    top_k: int = option("int", 0, "Keep the k most likely tokens; 0 or -1 keeps all.", low=0, high=2**31 - 1, also=(-1,))
    min_p: float = option("float", 0.0, "Keep tokens at least this likely relative to the most likely.", low=0, high=1)
    seed: int | None = option("int", None, "Makes the draw repeatable, whatever else is in the batch.", low=-(2**63), high=2**63 - 1)
    max_tokens: int | None = option(
        "int", 16, "Most tokens to generate; null = up to the model's limit.", low=1, high=2**31 - 1, nullable=True
    )
    min_tokens: int = option("int", 0, "Do not stop on a token before this many.", low=0, high=2**31 - 1)
    stop: list[str] | str | None = option("strings", None, "Strings that end the generation.", max_items=MAX_STOP_STRINGS)
    include_stop_str_in_output: bool = option("bool", False, "Keep the stop string, or the text of the stop token, in the text.")
    stop_token_ids: list[int] | None = option("ints", None, "Token ids that end the generation.", max_items=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = option("bool", False, "Generate past the end-of-sequence token.")
    logprobs: int | None = option(
        "int", None, "Return this many top log-probabilities per token, and the chosen one's.", low=0, high=2**31 - 1
    )
    prompt_logprobs: int | None = option(
        "int", None, "Return so many top log-probabilities at each token of the prompt, and the token's own.", low=0, high=2**31 - 1
    )
    detokenize: bool = option("bool", True, "Turn tokens into text.")
    skip_special_tokens: bool = option("bool", True, "Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = option("bool", True, "Let decoders put spaces between special tokens that are shown.")
    truncate_prompt_tokens: int | None = option(
        "int",
        None,
        "Keep only the last tokens of the prompt; -1 = as many as leave room for max_tokens.",
        low=1,
        high=2**31 - 1,
        also=(-1,),
    )

    use_beam_search: bool = option("bool", False, "Find the most likely sequences, with best_of (or n) beams.")
    length_penalty: float = option(
        "float", 1.0, "Beams compete by their log-probability, divided by their length to the power of this.", low=-10, high=10
    )
    early_stopping: bool | str = option(
        "stopping", False, "Whether a search ends with best_of sequences: true, false = when better ones are unlikely, never = impossible."
    )
    logit_bias: dict[int, float] | None = option(
        "biases",
        None,
        "Add to the logits of these token ids, before all else.",
        low=-100,
        high=100,
        max_items=MAX_LOGIT_BIAS,
        neutral=(None, {}),
    )
    repetition_penalty: float = option(
        "float", 1.0, "Divide positive logits of tokens in prompt or output by this, and multiply negative ones.", low=1e-3, high=1e3
    )
    frequency_penalty: float = option(
        "float", 0.0, "Subtract this from a token's logit for each time that the output has it.", low=-2, high=2
    )
    presence_penalty: float = option("float", 0.0, "Subtract this from the logits of tokens that the output has.", low=-2, high=2)
    allowed_token_ids: list[int] | None = option("ints", None, "Say only these tokens.", low_items=1, max_items=MAX_ALLOWED)
    bad_words: list[str] | None = option("texts", None, "Never say these words.", max_items=MAX_BAD_WORDS, neutral=(None, []))

    logits_processors: list[Any] | None = option(
        "processors",
        None,
        "In the library: names of the engine's processors, or slow functions of the output's ids and a row of logits.",
        max_items=MAX_PROCESSORS,
        neutral=(None, []),
    )
    extra_args: dict[str, Any] | None = option(
        "arguments", None, "In the library: arguments of the engine's processors.", max_items=MAX_ARGUMENTS, neutral=(None, {})
    )

    structured_outputs: StructuredOutputsParams | None = option(
        "structure", None, "Say only what is a JSON object, or follows a schema, regex, choice, grammar or structural tag."
    )
    guided_decoding: GuidedDecodingParams | None = option("structure", None, "The older name of structured_outputs.")
    priority: int = option("int", 0, "Lower goes first, with --scheduling-policy priority.", low=-(2**31), high=2**31 - 1)

    def __post_init__(self) -> None:
        for name, row in OPTIONS.items():
            setattr(self, name, checked(name, row, getattr(self, name)))
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise OptionError("guided_decoding", "structured_outputs and guided_decoding are the same option; give one")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError("min_tokens", f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})")
        if self.best_of is not None:
            self._check_best_of(self.best_of)
        self._check_search()

    def _check_best_of(self, best_of: int) -> None:
        if best_of < self.n:
            raise OptionError("best_of", f"best_of ({best_of}) must be at least n ({self.n})")
        if best_of > 1 and self.greedy and not self.use_beam_search:
            raise OptionError("best_of", f"best_of must be 1 at temperature 0, where every choice is the same, got {best_of}")

    def _check_search(self) -> None:
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != default_of(name):
                    raise OptionError(name, f"{name} needs use_beam_search; leave it out or send {default_of(name)!r}")
            return
        if self.temperature not in (0, 1):
            raise OptionError("temperature", f"temperature must be 0 or 1 in a beam search, which draws nothing, got {self.temperature:g}")
        for name in OPTIONS.keys() - WITH_BEAMS:
            if getattr(self, name) not in (*OPTIONS[name].neutral, *OPTIONS[name].also, None):
                raise OptionError(name, f"{name} cannot be used in a beam search; leave it out or send {default_of(name)!r}")

    @property
    def samples(self) -> int:
        """How many choices are generated, of which `n` are returned."""
        return self.best_of or self.n

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken; a temperature too small to divide by counts as 0."""
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def truncated(self, prompt: list[int], max_model_len: int) -> list[int]:
        """What `truncate_prompt_tokens` leaves of a prompt. Raises `OptionError` when it asks for more than the model takes."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return prompt
        if keep > max_model_len:
            raise OptionError(
                "truncate_prompt_tokens", f"truncate_prompt_tokens ({keep}) must be at most the model's maximum length of {max_model_len}"
            )
        if keep < 0:
            keep = max(1, max_model_len - (self.max_tokens or 1))
        return prompt[-keep:]


OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in dataclasses.fields(SamplingParams)}


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(SamplingParams)}


def default_of(name: str) -> Any:
    """The default of one option."""
    return _DEFAULTS[name]


def legal(row: Option) -> str:
    """The legal values of one option, in words."""
    if row.kind == "biases":
        return f"{row.low:g} to {row.high:g}, up to {row.max_items}"
    if row.low is not None and row.high is not None:
        high = "" if row.high >= 2**31 - 1 else f"{row.high:g}"
        low = (
            f"{'>' if row.open_low else '≥'} {row.low:g}"
            if abs(row.low) < 2**31
            else "64-bit integer"
            if abs(row.low) > 2**31
            else "32-bit integer"
        )
        return ", ".join([low + (f", ≤ {high}" if high else ""), *(f"or {value}" for value in row.also)])
    if row.kind == "structure":
        return "one of " + ", ".join(KINDS)
    if row.kind in ("strings", "texts", "ints", "processors", "arguments"):
        return f"up to {row.max_items}"
    return {"bool": "true, false", "stopping": "true, false, never"}.get(row.kind, row.kind)


def checked(name: str, row: Option, value: Any) -> Any:
    """`value` in canonical form, or `OptionError`. None stands for the default unless the option is nullable."""
    if value is None:
        return None if row.nullable else default_of(name)
    return _CHECKS[row.kind](name, row, value)


def plain(bound: float | None) -> str:
    """A bound as people write it: whole numbers with all their digits."""
    return "" if bound is None else str(int(bound)) if bound == int(bound) else f"{bound:g}"


def _bounded(name: str, row: Option, value: float) -> None:
    if value in row.also:
        return
    low_ok = row.low is None or (value > row.low if row.open_low else value >= row.low)
    if not low_ok or (row.high is not None and value > row.high):
        bracket = "(" if row.open_low else "["
        extra = "".join(f" or {x}" for x in row.also)
        got = value if abs(value) < 2**65 else "a larger number"  # an int of JSON can have thousands of digits
        raise OptionError(name, f"{name} must be in {bracket}{plain(row.low)}, {plain(row.high)}]{extra}, got {got}")


def _float(name: str, row: Option, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(name, f"{name} must be a number, got {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):  # an int may be too large for isfinite
        raise OptionError(name, f"{name} must be finite, got {value}")
    _bounded(name, row, value)
    return float(value)


def _int(name: str, row: Option, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(name, f"{name} must be an integer, got {type(value).__name__}")
    _bounded(name, row, value)
    return int(value)


def _bool(name: str, row: Option, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(name, f"{name} must be true or false, got {type(value).__name__}")
    return value


def _strings(name: str, row: Option, value: Any) -> Any:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(x, str) for x in items):
        raise OptionError(name, f"{name} must be a string or a list of strings")
    if len(items) > row.max_items:
        raise OptionError(name, f"{name} takes at most {row.max_items} strings, got {len(items)}")
    for text in items:
        if not text or len(text) > MAX_STOP_CHARS:
            raise OptionError(name, f"each string of {name} must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}")
    return value


def _structure(name: str, row: Option, value: Any) -> StructuredOutputsParams:
    try:
        return structure(value)
    except StructureError as error:
        raise OptionError(name, f"{name}: {error}") from None


def _texts(name: str, row: Option, value: Any) -> Any:
    if not isinstance(value, list):
        raise OptionError(name, f"{name} must be a list of strings, got {type(value).__name__}")
    found = _strings(name, row, value)
    if (chars := sum(map(len, found))) > MAX_BAD_WORD_CHARS:
        raise OptionError(name, f"{name} takes at most {MAX_BAD_WORD_CHARS} characters together, got {chars}")
    return found


def _ints(name: str, row: Option, value: Any) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:  # lists may be long, and true is no id
        raise OptionError(name, f"{name} must be a list of integers")
    unique = list(dict.fromkeys(value))
    if len(unique) < row.low_items:
        raise OptionError(name, f"{name} must hold at least {row.low_items}; leave it out to ask for nothing")
    if len(unique) > row.max_items:
        raise OptionError(name, f"{name} takes at most {row.max_items} ids, got {len(unique)}")
    for x in (min(unique, default=0), max(unique, default=0)):
        if not 0 <= x < 2**31:
            got = x if abs(x) < 2**65 else "a larger number"
            raise OptionError(name, f"{name} holds {got}, which is not a token id")
    return unique


def _biases(name: str, row: Option, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise OptionError(name, f"{name} must map token ids to numbers, got {type(value).__name__}")
    if len(value) > row.max_items:
        raise OptionError(name, f"{name} takes at most {row.max_items} token ids, got {len(value)}")
    biases = {_token_id(name, key): _bias(name, row, key, bias) for key, bias in value.items()}
    if len(biases) < len(value):
        raise OptionError(name, f"{name} names a token id twice")
    return biases


def _bias(name: str, row: Option, key: Any, value: Any) -> float:
    try:
        return _float(f"{name}[{key!r:.20}]", row, value)
    except OptionError as error:
        raise OptionError(name, str(error)) from None


def _token_id(name: str, key: Any) -> int:
    """The token id that a key of a JSON object, or of a dict, stands for."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 2**31:
        raise OptionError(name, f"{name} names {key!r:.20}, which is not a token id")
    return key


def _processors(name: str, row: Option, value: Any) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(x, str) or callable(x) for x in value):
        raise OptionError(name, f"{name} must be a list of names of processors, or of functions")
    if len(value) > row.max_items:
        raise OptionError(name, f"{name} takes at most {row.max_items} processors, got {len(value)}")
    return value


def _arguments(name: str, row: Option, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise OptionError(name, f"{name} must map names to numbers or lists of numbers")
    if len(value) > row.max_items:
        raise OptionError(name, f"{name} takes at most {row.max_items} arguments, got {len(value)}")
    for key, given in value.items():
        for number in given if isinstance(given, list) and given else [given]:
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not abs(number) < 2**64:
                raise OptionError(name, f"{name}[{key!r:.20}] must be a finite number or a list of them")
    return value


def _stopping(name: str, row: Option, value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "never":
        raise OptionError(name, f'{name} must be true, false or "never"')
    return bool(value) if isinstance(value, bool) else "never"


_CHECKS = {
    "float": _float,
    "stopping": _stopping,
    "int": _int,
    "bool": _bool,
    "strings": _strings,
    "texts": _texts,
    "ints": _ints,
    "structure": _structure,
    "biases": _biases,
    "processors": _processors,
    "arguments": _arguments,
}
