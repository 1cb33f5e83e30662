"""Data parallelism and ZeRO.

`techniques.data_parallel` is the technique. `reducer` sums replicated gradients in buckets. For
sharded models `unused` restores None as the gradient of unused parameters. `buffers` synchronises
the buffers that a forward changes, and `compression` keeps the state of compressed gradients.
"""
