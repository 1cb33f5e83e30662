"""Conversion of DeepSpeed and torch.distributed.checkpoint checkpoints to Plait's format.

Reading executes no code that a file names. `convert` is the entry point (`plait import`).
"""
