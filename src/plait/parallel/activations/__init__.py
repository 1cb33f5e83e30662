"""Activations between forward and backward: recomputation, and offload to host memory or files.

`selective` decides which results of the forward a recomputation reuses. `activation_store` moves
what a block saves for its backward to host memory or files.
"""
