"""Kernels for paged attention, one folder per op: a pure-JAX reference, back ends of the same
signature, cases. Imports jax only."""
