"""Hunyuan: hy.tiktoken, whose lines are numbered anew."""

from tokenizers.normalizers import NFC

from jaxllm.tokenizer_files.tiktoken import PATTERN_OF_DIGITS, Tiktoken, numbered

NAMES = [
    *"<|endoftext|> <|startoftext|> <|bos|> <|eos|> <|pad|>".split(),
    *(f"<|extra_{number}|>" for number in range(205)),
]

FORMAT = Tiktoken(
    classes=("HYTokenizer",),
    pattern=PATTERN_OF_DIGITS,
    specials=lambda base: NAMES,
    ranks=numbered,
    normalizer=NFC(),
)
