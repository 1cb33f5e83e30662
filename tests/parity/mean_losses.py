"""The loss of most people's loops, a mean over the micro-batch, and a comparison of weights."""

import torch

import plait

Weights = dict[str, torch.Tensor]


def mean_loss(model, batch):
    """Return the mean over the targets of a micro-batch, and their number."""
    total, weight = plait.causal_lm_loss(model(batch["input_ids"]), batch)
    return total / max(int(weight), 1), int(weight)


def close(actual, expected, *, rtol=0, atol=1e-12):
    """Compare tensors by name. The default tolerance is the rounding of float64."""
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name],
            tensor,
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )
