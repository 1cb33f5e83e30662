"""The training engine: one optimizer step over any layout."""
