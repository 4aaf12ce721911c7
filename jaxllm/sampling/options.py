"""Every sampling option, once: default, legal range, neutral value, column, documentation. Imports
no jax.

`SamplingParams` is a dataclass whose field metadata is the table. Validation, the wire schema,
`--help=sampling`, README's table, the slots' columns on the device and the choice of the sampling
program read it from `OPTIONS`. docs/sampling.md lists the files of a new option of one number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.grammar.structure import GuidedDecodingParams, StructuredOutputsParams
from jaxllm.sampling.values import Column, DrawColumn, Option, OptionError, checked

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_PROCESSORS = 16
MAX_ARGUMENTS = 256
MAX_ALLOWED = 2**18  # the largest vocabularies
GREEDY_BELOW = 1e-5  # temperatures that are too small to divide by count as 0
MIN_TOP_P = 1e-7  # programs flush smaller numbers to 0, and no token would reach a top_p of 0
# Options that a beam search takes
WITH_BEAMS = frozenset(
    "n best_of use_beam_search length_penalty early_stopping temperature seed max_tokens "
    "min_tokens stop_token_ids ignore_eos logprobs include_stop_str_in_output detokenize "
    "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens priority".split()
)


def option(form: str, default: Any, doc: str, **row: Any) -> Any:
    """A dataclass field that carries its entry of the table."""
    row.setdefault("neutral", (default,))
    return field(
        default=default,
        metadata={
            "option": Option(form, doc, nullable=row.pop("nullable", default is None), **row)
        },
    )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request; names and defaults are vLLM's. Raises `OptionError` on an illegal
    or unsupported value.

    It never changes: requests share it, and `dataclasses.replace` makes one that differs.
    """

    n: int = option("int", 1, "How many choices to generate from the prompt.", low=1, high=MAX_N)
    best_of: int | None = option(
        "int",
        None,
        "Generate so many choices and return the n most likely ones; null = n.",
        low=1,
        high=MAX_N,
    )
    temperature: float = option(
        "float",
        1.0,
        "Divides the logits; 0 picks the most likely token.",
        low=0,
        high=2,
        column=DrawColumn(np.float32, lambda value: 0.0 if value < GREEDY_BELOW else value),
    )
    top_p: float = option(
        "float",
        1.0,
        "Keep the smallest set of tokens whose probability reaches this.",
        low=0,
        high=1,
        open_low=True,
        column=DrawColumn(np.float32, lambda value: max(value, MIN_TOP_P), filters=True),
    )
    top_k: int = option(
        "int",
        0,
        "Keep the k most likely tokens; 0 or -1 keeps all.",
        low=0,
        high=2**31 - 1,
        also=(-1,),
        neutral=(0, -1),
        column=DrawColumn(np.int32, lambda value: max(value, 0), filters=True),
    )
    min_p: float = option(
        "float",
        0.0,
        "Keep tokens at least this likely relative to the most likely.",
        low=0,
        high=1,
        column=DrawColumn(np.float32, float, filters=True),
    )
    seed: int | None = option(
        "int",
        None,
        "Makes the draw repeatable, whatever else is in the batch.",
        low=-(2**63),
        high=2**63 - 1,
    )
    max_tokens: int | None = option(
        "int",
        16,
        "Most tokens to generate; null = up to the model's limit.",
        low=1,
        high=2**31 - 1,
        nullable=True,
    )
    min_tokens: int = option(
        "int", 0, "Do not stop on a token before this many.", low=0, high=2**31 - 1
    )
    stop: list[str] | str | None = option(
        "strings", None, "Strings that end the generation.", max_items=MAX_STOP_STRINGS
    )
    include_stop_str_in_output: bool = option(
        "bool", False, "Keep the stop string, or the text of the stop token, in the text."
    )
    stop_token_ids: list[int] | None = option(
        "ints", None, "Token ids that end the generation.", max_items=MAX_STOP_TOKEN_IDS
    )
    ignore_eos: bool = option("bool", False, "Generate past the end-of-sequence token.")
    logprobs: int | None = option(
        "int",
        None,
        "Return this many top log-probabilities per token, and the chosen one's; -1 = all.",
        low=0,
        high=2**31 - 1,
        also=(-1,),
    )
    prompt_logprobs: int | None = option(
        "int",
        None,
        "Return so many top log-probabilities of each prompt token, and its own; -1 = all.",
        low=0,
        high=2**31 - 1,
        also=(-1,),
    )
    stream_interval: int = option(
        "int",
        1,
        "Send a choice's tokens so many at a time; the first goes at once.",
        low=1,
        high=2**31 - 1,
    )
    detokenize: bool = option("bool", True, "Turn tokens into text.")
    skip_special_tokens: bool = option("bool", True, "Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = option(
        "bool", True, "Let decoders put spaces between special tokens that are shown."
    )
    truncate_prompt_tokens: int | None = option(
        "int",
        None,
        "Keep only the last tokens of the prompt; -1 = as many as leave room for max_tokens.",
        low=1,
        high=2**31 - 1,
        also=(-1,),
    )

    use_beam_search: bool = option(
        "bool", False, "Find the most likely sequences, with best_of (or n) beams."
    )
    length_penalty: float = option(
        "float",
        1.0,
        "Beams compete by their log-probability, divided by their length to the power of this.",
        low=-10,
        high=10,
    )
    early_stopping: bool | str = option(
        "stopping",
        False,
        "Whether a search ends with best_of sequences: true, "
        "false = when better ones are unlikely, never = impossible.",
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
        "float",
        1.0,
        "Divide positive logits of tokens in prompt or output by this, and multiply negative ones.",
        low=1e-3,
        high=1e3,
        column=Column(np.float32, float),
    )
    frequency_penalty: float = option(
        "float",
        0.0,
        "Subtract this from a token's logit for each time that the output has it.",
        low=-2,
        high=2,
        column=Column(np.float32, float),
    )
    presence_penalty: float = option(
        "float",
        0.0,
        "Subtract this from the logits of tokens that the output has.",
        low=-2,
        high=2,
        column=Column(np.float32, float),
    )
    allowed_token_ids: list[int] | None = option(
        "ints", None, "Say only these tokens.", low_items=1, max_items=MAX_ALLOWED
    )
    bad_words: list[str] | None = option(
        "texts", None, "Never say these words.", max_items=MAX_BAD_WORDS, neutral=(None, [])
    )

    logits_processors: list[Any] | None = option(
        "processors",
        None,
        "In the library: names of the engine's processors, "
        "or slow functions of the output's ids and a row of logits.",
        max_items=MAX_PROCESSORS,
        neutral=(None, []),
    )
    extra_args: dict[str, Any] | None = option(
        "arguments",
        None,
        "In the library: arguments of the engine's processors.",
        max_items=MAX_ARGUMENTS,
        neutral=(None, {}),
    )

    structured_outputs: StructuredOutputsParams | None = option(
        "structure",
        None,
        "Say only what is a JSON object, "
        "or follows a schema, regex, choice, grammar or structural tag.",
    )
    guided_decoding: GuidedDecodingParams | None = option(
        "structure", None, "The older name of structured_outputs."
    )
    priority: int = option(
        "int",
        0,
        "Lower goes first, with --scheduling-policy priority.",
        low=-(2**31),
        high=2**31 - 1,
    )

    def __post_init__(self) -> None:
        values = vars(self)  # until it is made it may change
        for name, row, default in _DEFAULTS:
            value = values[name]
            if value is default:  # most are, and defaults are legal
                continue
            if value is not None:
                values[name] = checked(name, row, value)
            elif not row.nullable:
                values[name] = default
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise OptionError(
                    "guided_decoding",
                    "structured_outputs and guided_decoding are the same option; give one",
                )
            values["structured_outputs"] = self.guided_decoding
            values["guided_decoding"] = None
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(
                "min_tokens",
                f"min_tokens ({self.min_tokens}) must be at most max_tokens ({self.max_tokens})",
            )
        if self.best_of is not None:
            self._check_best_of(self.best_of)
        self._check_search()

    def _check_best_of(self, best_of: int) -> None:
        if best_of < self.n:
            raise OptionError("best_of", f"best_of ({best_of}) must be at least n ({self.n})")
        if best_of > 1 and self.greedy and not self.use_beam_search:
            raise OptionError(
                "best_of",
                "best_of must be 1 at temperature 0, where every choice is the same, "
                f"got {best_of}",
            )

    def _check_search(self) -> None:
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != default_of(name):
                    raise OptionError(name, f"{name} needs use_beam_search; leave it out")
            return
        if self.temperature not in (0, 1):
            raise OptionError(
                "temperature",
                "temperature must be 0 or 1 in a beam search, which draws nothing, "
                f"got {self.temperature:g}",
            )
        for name in OPTIONS.keys() - WITH_BEAMS:
            if getattr(self, name) not in (*OPTIONS[name].neutral, *OPTIONS[name].also, None):
                raise OptionError(name, f"{name} cannot be used in a beam search; leave it out")

    @property
    def samples(self) -> int:
        """How many choices are generated, of which `n` are returned."""
        return self.best_of or self.n

    @property
    def output_limit(self) -> int:
        """Most tokens of an output, once the value is prepared for a prompt."""
        assert self.max_tokens is not None, "prepared for no prompt"
        return self.max_tokens

    @property
    def ranked(self) -> bool:
        """Whether choices are ranked by their log-probabilities."""
        return self.samples > self.n or self.use_beam_search

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if isinstance(self.stop, str):
            return [self.stop]
        return list(self.stop or [])

    def stops(self, eos_ids: Iterable[int]) -> set[int]:
        """Token ids that end an output of a model with these end-of-sequence ids."""
        ends = set(self.stop_token_ids or ())
        if self.ignore_eos:
            return ends
        return ends.union(eos_ids)

    def truncated(self, prompt: list[int], max_model_len: int) -> list[int]:
        """A prompt after `truncate_prompt_tokens`. Raises `OptionError` when that exceeds the
        model's limit."""
        keep = self.truncate_prompt_tokens
        if keep is None:
            return prompt
        if keep > max_model_len:
            raise OptionError(
                "truncate_prompt_tokens",
                f"truncate_prompt_tokens ({keep}) must be at most "
                f"the model's maximum length of {max_model_len}",
            )
        if keep < 0:
            keep = max(1, max_model_len - (self.max_tokens or 1))
        return prompt[-keep:]


OPTIONS: dict[str, Option] = {
    f.name: f.metadata["option"] for f in dataclasses.fields(SamplingParams)
}
_DEFAULTS = tuple((name, row, getattr(SamplingParams, name)) for name, row in OPTIONS.items())
COLUMNS: dict[str, Column] = {
    name: entry.column for name, entry in OPTIONS.items() if entry.column is not None
}
DRAW_COLUMNS = {name: column for name, column in COLUMNS.items() if isinstance(column, DrawColumn)}
PROCESS_COLUMNS = tuple(name for name in COLUMNS if name not in DRAW_COLUMNS)


def default_of(name: str) -> Any:
    """The default of one option."""
    return getattr(SamplingParams, name)


def is_set(params: SamplingParams, name: str) -> bool:
    """Whether an option has a value other than its neutral ones."""
    return getattr(params, name) not in OPTIONS[name].neutral


@dataclass(kw_only=True)
class BeamSearchParams:
    """Options of a beam search. Names and defaults are vLLM's, `early_stopping` is transformers'.
    Values are checked when a search starts."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None
    allowed_token_ids: list[int] | None = None

    def sampling(self) -> SamplingParams:
        """The equivalent `SamplingParams`. Raises `OptionError` on an illegal or unsupported
        value."""
        options = dict(vars(self))
        try:
            return SamplingParams(
                use_beam_search=True, n=options.pop("beam_width"), logprobs=0, **options
            )
        except OptionError as error:
            if error.param != "n":
                raise
            raise OptionError("beam_width", f"beam_width{str(error).removeprefix('n')}") from None
