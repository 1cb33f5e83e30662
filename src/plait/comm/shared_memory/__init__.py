"""Collectives between CPU processes of one machine, through memory that all of them map.

gloo moves tensors between processes of one machine through loopback sockets, which is several times
slower than memory that all of them map. `host` checks that the ranks of a group run on one machine,
and allocates their common memory. `collectives` has the all-gather, reduce-scatter and all-reduce
of data-parallel ranks. `parameters` stores the shards of a model in that memory, so that an
all-gather copies nothing. `comm.transport` decides which groups use these collectives. GPUs always
use NCCL.
"""
