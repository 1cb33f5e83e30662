"""The optimizer step on the host: torch's own, Plait's walk over files, DeepSpeed's CPU Adam."""
