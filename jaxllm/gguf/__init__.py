"""GGUF files: what they hold, as a Hugging Face model directory would say it. Imports no jax."""
