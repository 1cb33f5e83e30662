"""Norms, gradients and batches of a step, against plain torch in one process in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.losses.loss import WeightedLoss
from tests.parity.data_parallel import settings
from tests.parity.full_tensors import full_gradients, full_weights
from tests.parity.mean_losses import close
from tests.parity.refusals import message_of

STEPS, ROWS = 4, 8
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "gradient_clipping": 0.3}


def build():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()


def pair(step):
    """Return `[x, y]` of all ranks, as default collation does."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return [x, torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)]


squared_error = plait.per_sample(
    lambda output, batch: F.mse_loss(output, batch[1], reduction="sum")
)


def optimized_parameters(model):
    """Return all parameters but those of the first layer, which are in no optimizer."""
    return [p for name, p in model.named_parameters() if not name.startswith("0.")]


def change(model, optimizer, step):
    """Add a parameter group before the second step, and freeze a bias before the third."""
    if step == 1:
        optimizer.add_param_group({"params": optimized_parameters(model)[:1], "lr": 0.01})
    if step == 2:
        model.get_parameter("4.bias").requires_grad_(False)


def train_alone():
    """Return the norms and the weights of one process."""
    model = build()
    optimizer = torch.optim.SGD(optimized_parameters(model)[1:], lr=0.05)
    norms = []
    for step in range(STEPS):
        change(model, optimizer, step)
        x, y = pair(step)
        model.zero_grad()
        (F.mse_loss(model(x), y, reduction="sum") / ROWS).backward()
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(nn.utils.clip_grad_norm_(updated, 0.3)))
        optimizer.step()
    return norms, full_weights(model)


def loss_with_other_weights(output, batch):
    return squared_error(output, batch)[0], 2 * len(batch[0])


def train(rank, world, stage):
    """Train on two micro-batches per rank. Runs on every rank.

    Returns the norms, the weights, and the message for a loss that returns another weight than it
    was divided by, on rank 1 alone.
    """
    model = build()
    engine = plait.initialize(
        model,
        settings(world, stage, 1, 2, **SGD),
        loss_fn=squared_error,
        optimizer=lambda _: torch.optim.SGD(optimized_parameters(model)[1:], lr=0.05),
        forward=lambda m, batch: m(batch[0]),
    )
    norms = []
    start = rank * ROWS // world
    for step in range(STEPS):
        change(model, engine.optimizer, step)
        batch = [tensor[start : start + ROWS // world] for tensor in pair(step)]
        norms.append(float(engine.train_batch(batch).grad_norm))
        assert set(full_gradients(model).values()) == {None}
    weights = full_weights(model)

    loss = loss_with_other_weights if rank else squared_error
    engine.loss_fn = WeightedLoss(loss, lambda batch: len(batch[0]))
    return norms, weights, message_of(engine.train_batch, [tensor[:4] for tensor in pair(0)])


@pytest.mark.parametrize("stage", [0, 2])
def test_only_what_the_optimizer_holds_counts(pool, stage):
    """Covers defects A8, A16 and A25.

    Parameters outside of the optimizer are in no norm and keep no gradient (A8). A wrong weight of
    one rank's loss is reported on all (A16). `[x, y]` is cut into micro-batches (A25).
    """
    expected_norms, expected_weights = train_alone()
    for norms, weights, message in pool.run(2, train, stage):
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        close(weights, expected_weights)
        assert "the loss returned weights that add up to 12, and its weight function" in message
        assert "returned 8" in message
