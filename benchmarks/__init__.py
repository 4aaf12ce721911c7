"""Measurements of jaxllm: `python -m benchmarks` lists them. Results are JSON files with a
fingerprint of the machine."""
