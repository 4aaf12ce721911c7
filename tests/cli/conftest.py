"""Servers for the verbs that talk to one."""

from tests.server.conftest import model_dir, server, tokenizer

__all__ = ["model_dir", "server", "tokenizer"]
