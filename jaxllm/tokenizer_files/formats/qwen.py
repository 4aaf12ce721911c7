"""The first Qwen: qwen.tiktoken."""

from tokenizers.normalizers import NFC

from jaxllm.tokenizer_files.tiktoken import PATTERN_OF_DIGITS, Tiktoken

NAMES = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{number}|>" for number in range(205)),
]

FORMAT = Tiktoken(
    classes=("QWenTokenizer",),
    pattern=PATTERN_OF_DIGITS,
    specials=lambda base: NAMES,
    normalizer=NFC(),
)
