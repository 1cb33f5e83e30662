"""Checkpoints: safetensors shards and JSON manifests in a folder that appears whole or not at all,
and that loads on any layout.
"""
