"""Inference: generation and scoring of tokens by a sharded model.

`generate` and `score` run on the layout that a model is trained or loaded on. The other modules
serve `plait generate` and `plait plan infer`: they choose a deployment for a model, load its
weights, and stream the weights of models that are larger than memory.
"""
