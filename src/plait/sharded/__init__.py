"""Models that are sharded according to a layout.

`ShardedModel` runs the model for the engine, your own training loop (`plait.parallelize`), the
Trainer, evaluation and generation. `assemble.shard` creates it: it checks a model, splits it in
place, loads its weights, and attaches the hooks of its training steps. The other modules load and
gather weights, take a step, and refuse uses of the model that would silently give wrong results.
"""
