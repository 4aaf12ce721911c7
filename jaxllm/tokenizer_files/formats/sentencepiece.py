"""SentencePiece models of any other class, such as ERNIE's: nothing stands in front of a text."""

from jaxllm.tokenizer_files.sentencepiece import SentencePiece

FORMAT = SentencePiece(classes=())
