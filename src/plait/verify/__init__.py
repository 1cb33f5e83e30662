"""Comparison of a layout with one process, on a small model and ragged data."""
