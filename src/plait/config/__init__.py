"""The one file: read, checked, explained and resolved. Pure; techniques do not know it."""

from plait.config.resolving.resolve import Batch, Config, Resolved, load, resolve, smallest_world, solve_batch

__all__ = ["Batch", "Config", "Resolved", "load", "resolve", "smallest_world", "solve_batch"]
