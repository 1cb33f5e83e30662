"""Collectives between CPU processes of one machine, through memory that all of them map.

gloo moves tensors between processes of one machine through loopback sockets, several times slower
than the processes can read each other's memory. `host` checks which ranks run on this machine and
gives them common memory. `collectives` has the all-gather, reduce-scatter and all-reduce of the
data-parallel ranks. `parameters` stores the shards of a model in that memory, so that an all-gather
copies nothing. `comm.transport` decides whether a group uses them. GPUs always use NCCL.
"""
