"""The one file as types."""
