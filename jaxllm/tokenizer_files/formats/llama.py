"""Llama, Mistral and others of its tokenizer class, and models that name none."""

from jaxllm.tokenizer_files.sentencepiece import SentencePiece

FORMAT = SentencePiece(
    classes=("", "LlamaTokenizer", "CodeLlamaTokenizer"), begins=True, prefix_once=True
)
