"""Checks that `plait doctor --validate` runs on a machine's GPUs, and their results as JSON."""
