"""Command `plait doctor --validate`: the processes that it starts, and its output.

The checks themselves are in `plait.validation`.
"""
