"""What a user does with the parameters of a sharded model between steps: right as in one process, or refused by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.verify.parity import full_tensor_on_cpu
from tests.parity.mean_losses import close


class Net(nn.Module):
    """Layers of which one may write into its weight in the forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 1)
        self.writes = False

    def forward(self, x):
        if self.writes:
            with torch.no_grad():
                self.head.weight.mul_(0.5)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class ByNorm(torch.optim.SGD):
    """Takes steps of a length that it reads from its parameters and gradients, as LAMB, Prodigy and D-Adaptation do."""

    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = float(parameter.detach().norm()) / (parameter.grad.norm().item() + 1.0)
                with torch.no_grad():
                    parameter.add_(parameter.grad, alpha=-group["lr"] * ratio)


def batch(rank, step):
    """Rows of one rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 5, generator=generator).double(), torch.randn(
        2, 1, generator=generator
    ).double()


def squares(output, piece):
    """The loss of a sample, summed."""
    return F.mse_loss(output, piece[1], reduction="sum")


def between(model):
    """An evaluation on the model itself, then a write, of which neither the shards nor the gathered copies may be left behind."""
    with torch.inference_mode():
        model(torch.ones(2, 5).double())
    with torch.no_grad():
        model(torch.ones(2, 5).double())
        for parameter in model.parameters():
            parameter.mul_(0.9)


def reference(world, steps):
    """One plain process."""
    torch.manual_seed(1)
    model = Net().double()
    optimizer = ByNorm(model.parameters(), lr=0.1)
    for step in range(steps):
        for rank in range(world):
            piece = batch(rank, step)
            (squares(model(piece[0]), piece) / (2 * world)).backward()
        optimizer.step()
        optimizer.zero_grad()
        between(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def said(call):
    """The words of a refusal."""
    try:
        call()
    except plait.PlaitError as error:
        return str(error)
    return ""


def engine_task(rank, world, stage, transport):
    """Runs in a worker."""
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "parallel": {"transport": transport},
    }
    model = Net().double()
    engine = plait.initialize(
        model, config, loss_fn=plait.per_sample(squares), optimizer=lambda p: ByNorm(p, lr=0.1)
    )
    for step in range(2):
        engine.train_batch(batch(rank, step))
        between(model)
    weights = {name: full_tensor_on_cpu(parameter) for name, parameter in model.named_parameters()}

    refusals = []

    def train():
        engine.train_batch(batch(rank, 0))

    kept = model.head.weight
    handle = kept.register_hook(lambda grad: grad * 2)
    refusals.append(said(train))
    handle.remove()
    model.writes = True
    refusals.append(said(train))
    model.writes = False
    overridden = {"head.bias": torch.zeros(1).double()}
    refusals.append(said(lambda: torch.func.functional_call(model, overridden, batch(rank, 0)[:1])))
    refusals.append(said(train))  # nothing is wrong any more
    model.head.weight = nn.Parameter(torch.zeros(1, 5).double())
    refusals.append(said(train))
    model.head.weight = kept
    kept.data = kept.data * 2
    refusals.append(said(train))
    return weights, refusals


@pytest.mark.parametrize(("stage", "transport"), [(1, "auto"), (3, "torch")])
def test_parameters_of_a_sharded_model(pool, stage, transport):
    """Norms that an optimizer reads as numbers are the whole parameters'; a write behind an evaluation is kept; what shards cannot see is
    refused: a hook on a gradient, a write in the forward, another parameter, other data."""
    wanted = reference(2, steps=2)
    for found, refusals in pool.run(2, engine_task, stage, transport):
        close(found, wanted)
        hook, written, called, nothing, replaced, data = refusals
        assert "head.weight has a hook on its gradient" in hook
        assert "head.weight was written to while its shards were gathered" in written
        assert "head.bias was replaced after plait" in called
        assert "head.weight was replaced after plait" in replaced
        assert nothing == ""
        assert "head.weight.data was assigned to" in data


def new_parts(rank, world, stage):
    """Runs in a worker: a layer that is put in later, with an engine and in a loop of one's own."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model = Net().double()
    engine = plait.initialize(model, config, loss_fn=plait.per_sample(squares))
    model.head = nn.Linear(5, 1).double()
    engine.optimizer.add_param_group({"params": list(model.head.parameters())})
    first = said(lambda: engine.train_batch(batch(rank, 0)))
    own = plait.parallelize(Net().double(), config).model
    own.head = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    squares(own(batch(rank, 0)[0]), batch(rank, 0)).backward()
    return first, said(optimizer.step)


@pytest.mark.parametrize("stage", [0, 2])
def test_parts_that_were_put_in_later(pool, stage):
    """Their gradients would be one rank's alone."""
    for engine, own in pool.run(2, new_parts, stage):
        assert (
            "not part of the model when plait.initialize" in engine
            or "was replaced after plait" in engine
        )
        assert (
            "put into the model after plait.parallelize" in own or "was replaced after plait" in own
        )
