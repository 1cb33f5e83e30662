"""Analysis of models before they are distributed.

The modules of this package read an `nn.Module` and return plain data: its repeated blocks, sharding
units, experts and attention heads, the plan of tensor parallelism, and the split into pipeline
stages. They neither shard a model nor communicate.
"""
