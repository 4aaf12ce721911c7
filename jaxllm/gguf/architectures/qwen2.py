"""Qwen 2 and 2.5."""

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.config import base_config

ARCHITECTURE = Architecture(lambda model: base_config(model, "qwen2"), LLAMA_NAMES)
