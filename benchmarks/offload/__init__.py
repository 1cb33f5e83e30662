"""The optimizer step on the host: torch's own, Plait's step over files, DeepSpeed's CPU Adam."""
