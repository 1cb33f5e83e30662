"""Offload of optimizer states and parameters to host memory and files.

The techniques are in `techniques.offload`. For host memory they set an argument of `fully_shard`.
For files, `arena` maps tensors, and prefetches the shards of the unit that is gathered next.
"""
