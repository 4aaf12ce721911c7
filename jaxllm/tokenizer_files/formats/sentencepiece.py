"""SentencePiece models of Llama, Mistral, Gemma, InternLM 2 and others: tokenizer.model."""

from jaxllm.tokenizer_files.sentencepiece import SentencePiece

FORMAT = SentencePiece(classes=())
