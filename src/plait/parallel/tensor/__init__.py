"""Tensor parallelism and sequence parallelism.

`techniques.tensor_parallel` splits parameters by a plan (`model.plans`) and replaces the forward of
each module by one of `styles`. `overlap` hides their all-reduces behind matrix products, and
`hook_checks` refuses hooks that would see a part of a tensor.
"""
