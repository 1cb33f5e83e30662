"""Dry runs: execute a model on fake tensors to predict memory, FLOPs and traffic.

Fake tensors have shapes and dtypes but no memory. `DryModel` runs a forward and a backward of a
pipeline stage, `rank_activations` measures the activation memory of each pipeline rank in every
mode of recomputation, and `predict_peak` predicts the peak memory of a training step.
"""
