"""Data parallelism and ZeRO.

`data_parallel` is the technique. It reduces replicated gradients in buckets (`reducer`), or shards
the model into units of `fully_shard` (`shard_units`). `collective_selection` selects the
collectives of both, and `autotune` times candidates for compressed gradients.
"""
