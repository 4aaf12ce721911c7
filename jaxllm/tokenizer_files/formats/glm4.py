"""GLM-4 of 2024, as published with code of its own: tokenizer.model is a tiktoken file."""

from jaxllm.tokenizer_files.tiktoken import PATTERN, Tiktoken

NAMES = (
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> "
    "<|observation|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|>"
).split()

FORMAT = Tiktoken(
    classes=("ChatGLM4Tokenizer", "ChatGLMTokenizer"),
    pattern=PATTERN,
    specials=lambda base: NAMES,
    before=("[gMASK]", "<sop>"),
)
