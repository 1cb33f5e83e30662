"""Loops whose loss is the mean of a micro-batch, as most people's, and the comparison of their weights."""

import torch

import plait

Weights = dict[str, torch.Tensor]


def mean_loss(model, piece):
    """Mean over the micro-batch's targets, and how many there are."""
    total, weight = plait.causal_lm_loss(model(piece["input_ids"]), piece)
    return total / max(int(weight), 1), int(weight)


def close(found, wanted, *, rtol=0, atol=1e-12):
    """Within rounding of float64."""
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
