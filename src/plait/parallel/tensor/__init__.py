"""Tensor parallelism and sequence parallelism.

`techniques.tensor_parallel` splits parameters by a plan (`model.plans`) and replaces the forward of
each module with one of `styles`. `overlap` lets all-reduces overlap with matrix products, and
`hook_checks` refuses hooks that would receive a part of a tensor.
"""
