"""What the guards that are always on cost in a step."""
