"""Comparison of a layout with one process: small model, ragged data, two references, report."""
