"""Tensor parallelism and sequence parallelism."""
