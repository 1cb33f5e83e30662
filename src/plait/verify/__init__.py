"""Check that a parallel layout trains like a single process, on a small version of the model."""
