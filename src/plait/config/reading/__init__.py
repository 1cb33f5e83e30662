"""From a path, a mapping or arguments to a tree of plain values."""
