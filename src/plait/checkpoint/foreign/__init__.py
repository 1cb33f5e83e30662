"""Checkpoints of other libraries, read without running anything of theirs, and written as Plait's.
See `convert`.
"""
