"""Measurements a reader can repeat. Not part of the installed package; run from a checkout, `python -m benchmarks.<name>`."""
