"""How tokenizers of GGUF files split text: what the names of `tokenizer.ggml.pre` stand for, as
llama.cpp and the models' own tokenizer.json have it."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from jaxllm.tokenizer_files.formats import kimi
from jaxllm.tokenizer_files.tiktoken import PATTERN, PATTERN_OF_DIGITS

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + "+ENDING"
    r"|[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + "*ENDING"
    r"|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASES.replace("ENDING", "").replace("DIGITS", r"\p{N}")
_O200K = _CASES.replace("ENDING", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN = "[一-龥ࠀ-一가-퟿]+"


@dataclass(frozen=True)
class Splits:
    """How text is split before bytes are joined.

    Attributes:
        patterns: applied one after the other, each to the parts that the last one left.
        whole: whether a part that is a token is one, however merges would build it.
        begins: whether a text begins with the beginning of sequence unless the file says otherwise.
        normalizer: of text that is no special token.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    normalizer: Normalizer | None = None

    def pre_tokenizer(self) -> PreTokenizer:
        splits = [Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def _named(names: str, splits: Splits) -> dict[str, Splits]:
    return dict.fromkeys(names.split(), splits)


SPLITS: dict[str, Splits] = {
    **_named("llama3 llama-v3 llama-bpe falcon3 pixtral", Splits((PATTERN,), True, True)),
    **_named("dbrx smaug-bpe glm4 chatglm-bpe", Splits((PATTERN,))),
    **_named(
        "qwen2 deepseek-r1-qwen megrez hunyuan stablelm2 kormo",
        Splits((PATTERN_OF_DIGITS,), normalizer=NFC()),
    ),
    **_named(
        "gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling gigachat a.x-4.0 mellum",
        Splits((_GPT2,)),
    ),
    **_named("starcoder refact command-r smollm codeshell exaone", Splits((r"\p{N}", _GPT2))),
    # llama.cpp's own, for models of which it knows nothing
    "default": Splits(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", "[0-9][0-9][0-9]")
    ),
    "tekken": Splits((_TEKKEN,), True, True),
    **_named("gpt-4o llama4 kanana2 minimax-m2", Splits((_O200K,))),
    "deepseek-llm": Splits(
        (
            r"[\r\n]",
            r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _HAN,
            r"\p{N}",
        )
    ),
    "deepseek-coder": Splits((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    **_named(
        "deepseek-v3 hunyuan-dense",
        Splits((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_WORDS)),
    ),
    "kimi-k2": Splits((kimi.FORMAT.pattern,)),
}
