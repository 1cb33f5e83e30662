"""Changes of a sharded model's parameters between steps have effect or are refused by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from tests.parity.full_tensors import full_weights
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


class NormScaledSGD(torch.optim.SGD):
    """Takes steps whose length depends on norms of parameters and gradients.

    LAMB, Prodigy and D-Adaptation do so.
    """

    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                ratio = float(parameter.detach().norm()) / (parameter.grad.norm().item() + 1.0)
                with torch.no_grad():
                    parameter.add_(parameter.grad, alpha=-group["lr"] * ratio)


def batch(rank, step):
    """Return the two samples of a rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(2, 5, generator=generator).double()
    targets = torch.randn(2, 1, generator=generator).double()
    return inputs, targets


def squares(output, batch):
    return F.mse_loss(output, batch[1], reduction="sum")


def change_between_steps(model):
    """Evaluate on the model itself, then write to its parameters.

    The write must reach the shards although the evaluation has gathered copies.
    """
    with torch.inference_mode():
        model(torch.ones(2, 5).double())
    with torch.no_grad():
        model(torch.ones(2, 5).double())
        for parameter in model.parameters():
            parameter.mul_(0.9)


def reference(world, steps):
    """Return the weights after training in one plain process."""
    torch.manual_seed(1)
    model = Net().double()
    optimizer = NormScaledSGD(model.parameters(), lr=0.1)
    for step in range(steps):
        for rank in range(world):
            samples = batch(rank, step)
            (squares(model(samples[0]), samples) / (2 * world)).backward()
        optimizer.step()
        optimizer.zero_grad()
        change_between_steps(model)
    return full_weights(model)


def message_of(function, *arguments):
    """Return the message with which a call is refused, or an empty text."""
    try:
        function(*arguments)
    except plait.PlaitError as error:
        return str(error)
    return ""


def changed(rank, world, stage, transport):
    """Return the weights after two steps, and messages by the change. Runs on every rank."""
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "parallel": {"transport": transport},
    }
    model = Net().double()
    engine = plait.initialize(
        model,
        config,
        loss_fn=plait.per_sample(squares),
        optimizer=lambda parameters: NormScaledSGD(parameters, lr=0.1),
    )
    for step in range(2):
        engine.train_batch(batch(rank, step))
        change_between_steps(model)
    weights = full_weights(model)

    messages = {}
    samples = batch(rank, 0)
    weight = model.head.weight
    hook = weight.register_hook(lambda gradient: gradient * 2)
    messages["hook"] = message_of(engine.train_batch, samples)
    hook.remove()

    model.writes = True
    messages["write in the forward"] = message_of(engine.train_batch, samples)
    model.writes = False

    bias = {"head.bias": torch.zeros(1).double()}
    messages["functional call"] = message_of(torch.func.functional_call, model, bias, samples[:1])
    messages["none"] = message_of(engine.train_batch, samples)

    model.head.weight = nn.Parameter(torch.zeros(1, 5).double())
    messages["another parameter"] = message_of(engine.train_batch, samples)
    model.head.weight = weight

    weight.data = weight.data * 2
    messages["other data"] = message_of(engine.train_batch, samples)
    return weights, messages


REFUSED = {
    "hook": "head.weight has a hook on its gradient",
    "write in the forward": "head.weight was written to while its shards were gathered",
    "functional call": "head.bias was replaced after plait",
    "another parameter": "head.weight was replaced after plait",
    "other data": "head.weight.data was assigned to",
}


@pytest.mark.parametrize(("stage", "transport"), [(1, "auto"), (3, "torch")])
def test_changes_between_steps_have_effect_or_are_refused(pool, stage, transport):
    expected = reference(2, steps=2)
    for weights, messages in pool.run(2, changed, stage, transport):
        close(weights, expected)
        assert messages.pop("none") == ""
        for change, message in messages.items():
            assert REFUSED[change] in message


def with_new_layer(rank, world, stage):
    """Put a layer into a model of an engine and into one of a loop. Runs on every rank."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model = Net().double()
    engine = plait.initialize(model, config, loss_fn=plait.per_sample(squares))
    model.head = nn.Linear(5, 1).double()
    engine.optimizer.add_param_group({"params": list(model.head.parameters())})
    in_engine = message_of(engine.train_batch, batch(rank, 0))

    model = plait.parallelize(Net().double(), config).model
    model.head = nn.Linear(5, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    squares(model(batch(rank, 0)[0]), batch(rank, 0)).backward()
    return in_engine, message_of(optimizer.step)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_layer_that_was_added_later_is_refused(pool, stage):
    """The gradients of the layer would be those of one rank."""
    for in_engine, in_loop in pool.run(2, with_new_layer, stage):
        assert "not part of the model when plait.initialize" in in_engine
        assert "put into the model after plait.parallelize" in in_loop
