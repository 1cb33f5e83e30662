"""Checks that `plait doctor --validate` runs on the GPUs of a machine, and the JSON results."""
