"""Measurements of jaxllm; `python -m benchmarks` lists them. Results are JSON files that name the
machine."""
