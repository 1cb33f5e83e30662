"""Computation of modules in tiles of tokens.

`tiled_mlp` is the technique, and `tiles` is the forward that it installs.
"""
