"""Offload of optimizer states and parameters to host memory and files.

`techniques.offload` holds the techniques. Host memory is an argument of `fully_shard`. For files,
`arena` maps tensors, and prefetches the shards of the unit that is gathered next.
"""
