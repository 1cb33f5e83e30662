"""Offload of optimizer states and parameters to host memory and files.

`optimizer_offload` and `parameter_offload` are the techniques. Host memory is an argument of
`fully_shard`. For files, `arena` maps tensors, and `shard_reader` prefetches the shards of the unit
that is gathered next.
"""
