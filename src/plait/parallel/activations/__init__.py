"""Activations: recomputation, offload, and what a rank holds of them."""
