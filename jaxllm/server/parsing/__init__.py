"""Output pipeline: generated text → reasoning, tool calls, reply. See README.md."""
