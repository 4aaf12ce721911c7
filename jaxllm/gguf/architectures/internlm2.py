"""InternLM 2, which is a Llama here: converters take its joint map apart."""

from jaxllm.gguf.architectures import llama

ARCHITECTURE = llama.ARCHITECTURE
