"""Structured output: what a request may ask for, compiled to a grammar in a process that can be
killed, and matched token by token."""
