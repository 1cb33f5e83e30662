"""A model on a layout: one handle under the engine, your own training loop, and what else runs a
model.
"""
