"""The operator's room: `python -m server` from a checkout. The HTTP code is in `jaxllm/server/`."""
