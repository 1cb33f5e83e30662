"""Measurements that a reader can repeat in a checkout with `python -m benchmarks.NAME`."""
