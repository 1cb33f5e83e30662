"""A model's stages on fake tensors: what a micro-batch keeps, computes and sends, and the peak
memory of a step.
"""
