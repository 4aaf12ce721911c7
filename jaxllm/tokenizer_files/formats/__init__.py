"""Formats of tokenizers, one a file, found by listing this folder: each has a `FORMAT`."""
