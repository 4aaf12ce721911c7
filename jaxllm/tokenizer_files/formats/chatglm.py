"""ChatGLM 2 and 3: a SentencePiece model, with special tokens behind its pieces."""

from tokenizers import AddedToken

from jaxllm.tokenizer_files.sentencepiece import SentencePiece

# Words in brackets are found anywhere; "sop" and "eop" are parts of words, too
NAMES = ("[MASK] [gMASK] [sMASK] sop eop <|system|> <|user|> <|assistant|> <|observation|>").split()

FORMAT = SentencePiece(
    classes=("ChatGLMTokenizer",),
    after_pieces=tuple(
        AddedToken(name, single_word=name.isalpha(), normalized=False, special=True)
        for name in NAMES
    ),
    before=("[gMASK]", "sop"),
)
