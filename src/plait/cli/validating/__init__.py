"""`plait doctor --validate`: the processes that it starts, and what it shows."""
