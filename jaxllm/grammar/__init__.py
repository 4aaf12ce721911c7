"""Structured output: a request's structure, compiled to a grammar in a process that can be killed,
and matched token by token."""
