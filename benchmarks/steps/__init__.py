"""Training steps of different engines on the same model and batches, which take turns."""
