"""Sharded checkpoints: safetensors files and JSON manifests, committed atomically.

A save publishes either a complete checkpoint or nothing, and a checkpoint loads on any layout of
ranks. `snapshot` and `write` (`plait.checkpoint.save`) write one, `candidates`
(`plait.checkpoint.folder`) decides which one to resume from, and `Reader` (`plait.checkpoint.load`)
reads it. See Note [Life of a save] in `plait.checkpoint.save`.
"""
