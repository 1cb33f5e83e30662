"""Import of checkpoints of DeepSpeed and torch.distributed.checkpoint, which become Plait's own.

Reading executes no code that a file names. `convert` is the entry point (`plait import`).
"""
