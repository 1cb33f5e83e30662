"""A step whose gradients are not finite, in bf16, which has no loss scale to lower: skipped with check_grad_overflow, else the run ends."""

import pytest
import torch
from torch import nn

import plait
from plait.errors import NumbersError


@pytest.mark.parametrize("checked", [True, False])
def test_a_bf16_step_that_is_not_finite_changes_nothing(checked):
    torch.manual_seed(0)
    bf16 = {"enabled": True, "check_grad_overflow": checked}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": bf16,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = plait.initialize(
        nn.Linear(4, 3), config, loss_fn=plait.per_sample(lambda out, _: out.float().square().sum())
    )
    before = [p.detach().clone() for p in engine.model.parameters()]
    try:
        if checked:
            assert engine.train_batch(iter([torch.full((2, 4), float("inf"))])).skipped
        else:
            words = "the loss of rank 0 is not finite; the gradient of `weight`"
            with pytest.raises(NumbersError, match=words):
                engine.train_batch(iter([torch.full((2, 4), float("inf"))]))
        assert all(
            torch.equal(p, old) for p, old in zip(engine.model.parameters(), before, strict=True)
        )
    finally:
        engine.close()
