"""Checks that `plait doctor --validate` runs on the GPUs of this machine, and their document."""
