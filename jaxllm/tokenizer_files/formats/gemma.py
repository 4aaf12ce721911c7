"""Gemma, whose pieces have no prefix space, and InternLM 2, where each part of a text has one."""

from jaxllm.tokenizer_files.sentencepiece import SentencePiece

FORMAT = SentencePiece(classes=("GemmaTokenizer", "InternLM2Tokenizer"), begins=True)
