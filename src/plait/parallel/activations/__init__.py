"""Activations between forward and backward: recomputation, and offload to host memory or files.

`recompute` replaces the forward of blocks, with `selective` and `decisions` for what a
recomputation reuses. `saved_tensors` moves what a block saves into the stores of
`activation_store`; `activation_offload` holds their settings.
"""
