"""Modules whose tokens are computed a tile at a time."""
