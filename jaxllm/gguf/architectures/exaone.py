"""EXAONE 3, 3.5 and Deep, which are Llamas under other names. Rows of queries and keys keep their
order."""

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.architectures import llama

ARCHITECTURE = Architecture(llama.config, LLAMA_NAMES)
