"""Kimi and Moonlight: tiktoken.model, with ids for 256 special tokens after the ranks."""

from jaxllm.tokenizer_files.tiktoken import Tiktoken, reserved

_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

FORMAT = Tiktoken(
    classes=("TikTokenTokenizer",),
    pattern=(
        r"[\p{Han}]+"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDING}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDING}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    specials=reserved(256),
)
