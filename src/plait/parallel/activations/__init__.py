"""Activations between forward and backward: recomputation, and offload to host memory or files.

`selective` decides what a recomputation reuses of the forward. `activation_store` moves what a
block saves for its backward to host memory or files.
"""
