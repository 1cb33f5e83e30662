"""Losses that return (sum, weight), the only form whose global mean is the same on every layout.

`loss` defines the form and the loss of causal language models. `chunked_loss` computes the same
without full logits, and `balance_loss` adds the losses of routers.
"""
