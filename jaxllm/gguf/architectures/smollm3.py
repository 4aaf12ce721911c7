"""SmolLM 3, where every fourth layer does not turn."""

from jaxllm.gguf.architecture import LLAMA_NAMES, Architecture
from jaxllm.gguf.architectures import llama
from jaxllm.gguf.config import base_config

ARCHITECTURE = Architecture(lambda model: base_config(model, "smollm3"), LLAMA_NAMES, llama.CHANGES)
