"""Modes of blocks, budgets of one stage, and blocks whose forward changes their state."""

import functools
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import plait
from plait.cluster.layout import Layout
from plait.errors import ConfigError, InputError, ModelError
from plait.parallel.accounting.activations import (
    ONE_STAGE,
    RankActivations,
    StageFacts,
    StageMode,
)
from plait.parallel.parts import Parts
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.recompute import Recompute
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.sizes import GIB

SAVED_BYTES = {"none": 100, "selective": 30, "full": 4}
FLOPS = {"none": 300, "selective": 340, "full": 400}


def activations_of(blocks, *, saved_bytes=SAVED_BYTES, outside=3, head=11):
    """Activations of a rank without a pipeline, with equal blocks."""
    modes = {}
    for mode, size in saved_bytes.items():
        restored = (saved_bytes["none"] - size,) * blocks
        sizes = (size,) * blocks
        modes[mode] = StageMode(sizes, outside, head, restored=restored, flops=FLOPS[mode])
    return RankActivations(ONE_STAGE, 0, (StageFacts(modes),))


def test_every():
    assert Recompute(mode="full", every=2).modes(5) == ("full", "none", "full", "none", "full")
    assert Recompute(mode="selective").modes(2) == ("selective", "selective")
    assert Recompute().modes(2) == ("none", "none")


def test_the_account_by_hand():
    rank = activations_of(3)
    (stage,) = rank.stages
    assert stage.saved(("full", "none", "selective")) == 3 + 4 + 100 + 30
    assert stage.restored(("full", "none", "selective")) == 96
    assert stage.restored(("none",) * 3) == 0
    assert rank.peak_bytes(("full",) * 3) == 3 + 12 + 11 + 96


@given(budget=st.integers(0, 500), blocks=st.integers(1, 5))
def test_a_budget_is_met_with_the_least_recomputation(budget, blocks):
    """The optimum is over all assignments, in any order."""
    rank = activations_of(blocks)
    solved = rank.solve(budget)
    modes = product(SAVED_BYTES, repeat=blocks)
    fitting = [assignment for assignment in modes if rank.peak_bytes(assignment) <= budget]
    if solved is None:
        assert not fitting
        return

    def flops(assignment):
        return sum(FLOPS[mode] for mode in assignment)

    assert rank.peak_bytes(solved) <= budget
    assert flops(solved) == min(map(flops, fitting))


def test_a_budget_that_is_too_small_is_refused():
    """The message has the numbers, and its remedy works."""
    technique = Recompute(mode="budget", budget_bytes=GIB, sequence_length=8)
    # With one byte in the head, a budget of the number of GiB that the message shows is too small
    # unless it is rounded up.
    large = activations_of(2, saved_bytes={"none": 3 * GIB, "full": GIB}, outside=0, head=1)
    message = r"budget_gib = 1.0: with every block recomputed a micro-batch needs 4 GiB"
    with pytest.raises(ConfigError, match=message) as error:
        technique.solved([large])
    sufficient_gib = float(error.value.problems[0].remedy.split()[1])
    sufficient = technique.model_copy(update={"budget_bytes": round(sufficient_gib * GIB)})
    assert sufficient.solved([large]).modes(2) == ("full", "full")
    assert technique.solved([activations_of(2)]).modes(2) == ("none", "none")


class Block(nn.Module):
    """Block as Transformers has them, with its own recompute."""

    def __init__(self, gradient_checkpointing):
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing


def check(technique, *, compiled=False, sequence_parallel=False, model_recomputes=False, blocks=2):
    model = nn.Sequential(*(Block(model_recomputes) for _ in range(blocks)))
    names = tuple(str(index) for index in range(blocks))
    other = (TensorParallel(sequence_parallel=sequence_parallel), Compile(enabled=compiled))
    technique.check(TechniqueContext(Layout(), other, model=model, blocks=names))


@pytest.mark.parametrize(
    ("technique", "other", "message"),
    [
        (Recompute(mode="full"), {"model_recomputes": True}, "already recomputes"),
        (Recompute(mode="full"), {"blocks": 0}, "no repeated blocks"),
        (Recompute(mode="selective"), {"compiled": True}, "the compiler replaces the operators"),
        (
            Recompute(mode="full", partition_inputs=True),
            {"sequence_parallel": True},
            "already shards a block's input over tp",
        ),
        (Recompute(mode="selective", keep=("mm",)), {}, "no such operator"),
    ],
)
def test_refusals(technique, other, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        check(technique, **other)


def test_no_recompute_is_never_refused():
    check(Recompute(), compiled=True, sequence_parallel=True, blocks=0)


class Counting(nn.Module):
    """A block whose forward changes its state.

    Buffers change in place, without a change of torch's version counter, by assignment, and by the
    power iterations of a parametrization. Attributes are a number, lists, a tensor that is
    assigned, one that changes in place, and one that a forward adds.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("still", torch.ones(4))
        self.calls = 0
        self.history = []
        self.seen = {}
        self.level = torch.zeros(4)
        self.last = None

    def forward(self, x):
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        self.history.append(0.1 * self.calls)
        self.seen["rows"] = self.seen.get("rows", 0) + len(x)
        self.added = getattr(self, "added", 0) + 1
        self.level += x.detach().mean(0)
        x = x * (1 + sum(self.history) + 0.1 * self.seen["rows"] + 0.1 * self.added) + self.level
        if self.last is not None:
            x = x + self.last.mean()
        self.last = x.detach()
        return torch.tanh(self.norm(self.linear(x - self.mean))) * (1 + 0.1 * self.steps)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_state_that_a_forward_changes(mode):
    """A recomputation starts from the forward's state and leaves the forward's result.

    All gradients and states have the same bits as without recompute.
    """

    def run(technique):
        torch.manual_seed(0)
        model = nn.Sequential(Counting(), Counting())
        if technique is not None:
            technique.apply(Parts(model=model, blocks=("0", "1")), SimpleNamespace())
        # The first training forward must also notice what changed in evaluation only.
        model.eval()
        model(torch.randn(3, 4)).sum().backward()
        model.train()
        for _ in range(2):
            # Two micro-batches are in flight, and the first one is recomputed twice.
            first = model(torch.randn(3, 4))
            second = model(torch.randn(3, 4))
            first.square().sum().backward(retain_graph=True)
            second.square().sum().backward()
            first.sum().backward()
        state = [p.grad for p in model.parameters() if p.grad is not None]
        state += model.buffers()
        for block in model:
            state.append(torch.tensor([block.calls, *block.history, block.added]))
            state += [block.level, block.last]
        return state

    for actual, expected in zip(run(Recompute(mode=mode)), run(None), strict=True):
        assert torch.equal(actual, expected)


def counts_calls(forward):
    @functools.wraps(forward)
    def wrapper(self, x):
        self.calls += 1
        return forward(self, x)

    return wrapper


class Decorated(nn.Linear):
    calls = 0

    @counts_calls
    def forward(self, x):
        return x + super().forward(x).tanh()


def test_close_restores_decorated_forwards():
    """Only the wrapper of recompute is removed."""
    model = nn.Sequential(*(Decorated(4, 4) for _ in range(3)))
    parallel = {"recompute": {"mode": "full"}, "blocks": ["0", "1", "2"]}
    config = {"train_micro_batch_size_per_gpu": 2, "parallel": parallel}
    loss = plait.per_sample(lambda out, batch: out.square().sum())
    engine = plait.initialize(model, config, loss_fn=loss)
    assert all("forward" in vars(block) for block in model)
    engine.close()
    model(torch.randn(2, 4))
    assert [block.calls for block in model] == [1, 1, 1]


class ChangesLater(nn.Linear):
    """A block that changes a tensor in place from its third forward on."""

    def __init__(self):
        super().__init__(4, 4)
        self.calls = 0
        self.total = torch.zeros(4)

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            self.total += 1
        return super().forward(x + self.total).tanh()


def test_a_tensor_that_changes_late_is_refused():
    """The remedy of the message works."""

    def prepared(mode):
        model = nn.Sequential(ChangesLater())
        Recompute(mode=mode).apply(Parts(model=model, blocks=("0",)), SimpleNamespace())
        return model

    model = prepared("full")
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
    message = 'total of a ChangesLater .* parallel.recompute.mode = "none"'
    with pytest.raises(InputError, match=message):
        model(torch.randn(3, 4))

    model = prepared("none")
    for _ in range(4):
        model(torch.randn(3, 4)).sum().backward()
