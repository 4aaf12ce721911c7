"""`BeamSearchParams`, the options of `LLM.beam_search`. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.values import OptionError


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
