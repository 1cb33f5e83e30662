"""What a step counts and forgets, and what it takes for a batch: against plain torch in one process, float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.losses.loss import WeightedLoss
from plait.verify.parity import full_tensor_on_cpu
from tests.parity.data_parallel import settings
from tests.parity.mean_losses import close

STEPS, ROWS = 4, 8
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "gradient_clipping": 0.3}


def net():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()


def pairs(step):
    """What default collation gives: `[x, y]`, all ranks' rows."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)
    return [x, torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)]


squares = plait.per_sample(lambda output, batch: F.mse_loss(output, batch[1], reduction="sum"))


def some(model):
    """Without the first layer, which is trainable and in no optimizer."""
    return [p for name, p in model.named_parameters() if not name.startswith("0.")]


def alone():
    """Norms and weights of one process. The last layer's bias is frozen before the third step, the second group added before the second."""
    model = net()
    parameters = some(model)
    optimizer = torch.optim.SGD(parameters[1:], lr=0.05)
    norms = []
    for step in range(STEPS):
        change(model, optimizer, step)
        x, y = pairs(step)
        model.zero_grad()
        (F.mse_loss(model(x), y, reduction="sum") / ROWS).backward()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(nn.utils.clip_grad_norm_(held, 0.3)))
        optimizer.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def change(model, optimizer, step):
    if step == 1:
        optimizer.add_param_group({"params": some(model)[:1], "lr": 0.01})
    if step == 2:
        model.get_parameter("4.bias").requires_grad_(False)


def apart(rank, world, stage):
    """Runs in a worker: the same over two ranks, two micro-batches each, from `[x, y]`."""
    model = net()
    config = settings(world, stage, 1, 2, **SGD)
    engine = plait.initialize(
        model,
        config,
        loss_fn=squares,
        optimizer=lambda _: torch.optim.SGD(some(model)[1:], lr=0.05),
        forward=lambda m, b: m(b[0]),
    )
    norms, left = [], []
    share = ROWS // world
    for step in range(STEPS):
        change(model, engine.optimizer, step)
        result = engine.train_batch(
            [part[rank * share : (rank + 1) * share] for part in pairs(step)]
        )
        norms.append(float(result.grad_norm))
        left.append([name for name, p in model.named_parameters() if p.grad is not None])
    weights = {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}
    return {"norms": norms, "left": left, "weights": weights, "said": counted_twice(engine, rank)}


def counted_twice(engine, rank):
    """A16: a loss whose two weights differ, on one rank alone."""

    def total(output, batch):
        return squares(output, batch)[0], 2 * len(batch[0]) if rank else len(batch[0])

    engine.loss_fn = WeightedLoss(total, lambda batch: len(batch[0]))
    try:
        engine.train_batch([part[:4] for part in pairs(0)])
    except plait.PlaitError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 2])
def test_only_what_the_optimizer_holds_counts(pool, stage):
    """A8: parameters outside of the optimizer are in no norm and keep no gradient; groups may be added and parameters frozen later.
    A25: `[x, y]` in two micro-batches. A16: another weight is found on every rank."""
    norms, weights = alone()
    for found in pool.run(2, apart, stage):
        assert found["norms"] == pytest.approx(norms, rel=1e-12)
        assert found["left"] == [[]] * STEPS
        close(found["weights"], weights)
        assert (
            "the loss returned weights that add up to 12, and its weight function" in found["said"]
            and "returned 8" in found["said"]
        )
