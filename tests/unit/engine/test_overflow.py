"""Steps whose gradients are not finite in bf16, which has no loss scale that could be lowered."""

import pytest
import torch
from torch import nn

import plait
from plait.errors import NumbersError


@pytest.mark.parametrize("skips", [True, False])
def test_a_non_finite_bf16_step_changes_nothing(skips):
    """The step is skipped with check_grad_overflow. Otherwise the run ends."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True, "check_grad_overflow": skips},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    loss = plait.per_sample(lambda output, _: output.float().square().sum())
    engine = plait.initialize(nn.Linear(4, 3), config, loss_fn=loss)
    before = [p.detach().clone() for p in engine.model.parameters()]
    batches = iter([torch.full((2, 4), float("inf"))])
    try:
        if skips:
            assert engine.train_batch(batches).skipped
        else:
            message = "the loss of rank 0 is not finite; the gradient of `weight`"
            with pytest.raises(NumbersError, match=message):
                engine.train_batch(batches)
        torch.testing.assert_close(list(engine.model.parameters()), before, rtol=0, atol=0)
    finally:
        engine.close()
