"""`python -m server` from a checkout; the HTTP code is in `jaxllm/server/`."""
