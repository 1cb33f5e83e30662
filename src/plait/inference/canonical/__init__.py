"""Arithmetic whose results depend on the numbers alone, so that every layout and every batch gives the same bits."""
