"""Architectures of GGUF files, one a file, found by listing this folder: each has an
`ARCHITECTURE`."""
