"""Kernels, one folder per op: a reference in plain JAX, back ends with the same signature, and test
cases. Imports jax and numpy only."""
