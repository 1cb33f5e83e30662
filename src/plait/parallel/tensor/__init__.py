"""Tensor parallelism and sequence parallelism.

`tensor_parallel` is the technique. It splits parameters by a plan (`model.plans`) and replaces the
forward of each module by one of `styles`.
"""
