"""Tokenizers from files that transformers reads only with other packages or by running a
repository's code: SentencePiece models, tiktoken files, tekken.json. Imports no jax."""

from jaxllm.tokenizer_files.byte_pairs import byte_alphabet
from jaxllm.tokenizer_files.directory import load_file
from jaxllm.tokenizer_files.settings import names_own_code

__all__ = ["byte_alphabet", "load_file", "names_own_code"]
