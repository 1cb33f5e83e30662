"""Readers of configurations: files, mappings, base64 text and arguments become trees of values."""
