"""How long a checkpoint keeps the training thread, beside torch's distributed checkpoint."""
