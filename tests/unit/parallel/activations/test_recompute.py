"""Which blocks recompute, and a budget solved from figures."""

import functools
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


def rank_of(count, *, kept, flops, outside=3, head=11):
    modes = {}
    for mode, size in kept.items():
        restored = (kept["none"] - size,) * count
        sizes = (size,) * count
        modes[mode] = StageMode(sizes, outside, head, restored=restored, flops=flops[mode])
    return RankActivations(ONE_STAGE, 0, (StageFacts(modes),))


KEPT = {"none": 100, "selective": 30, "full": 4}
FLOPS = {"none": 300, "selective": 340, "full": 400}


def test_every():
    assert Recompute(mode="full", every=2).modes(5) == ("full", "none", "full", "none", "full")
    assert Recompute(mode="selective").modes(2) == ("selective", "selective")
    assert Recompute().modes(2) == ("none", "none")


def test_the_account_by_hand():
    rank = rank_of(3, kept=KEPT, flops=FLOPS)
    (found,) = rank.stages
    assert found.saved(("full", "none", "selective")) == 3 + 4 + 100 + 30
    assert found.restored(("full", "none", "selective")) == 96
    assert found.restored(("none",) * 3) == 0
    assert rank.peak_bytes(("full",) * 3) == 3 + 12 + 11 + 96


@given(budget=st.integers(0, 500), count=st.integers(1, 5))
def test_a_budget_is_kept_with_the_least_work(budget, count):
    from itertools import product

    found = rank_of(count, kept=KEPT, flops=FLOPS)
    solved = found.solve(budget)
    work = {"none": 0, "selective": 40, "full": 100}
    fitting = [modes for modes in product(KEPT, repeat=count) if found.peak_bytes(modes) <= budget]
    if solved is None:
        assert not fitting
        return
    assert found.peak_bytes(solved) <= budget
    least = min(sum(work[mode] for mode in modes) for modes in fitting)
    assert sum(work[mode] for mode in solved) == least


def test_what_does_not_fit_is_refused_with_the_numbers():
    technique = Recompute(mode="budget", budget_bytes=GIB, sequence_length=8)
    # A byte more than the rule shows.
    large = rank_of(2, kept={"none": 3 * GIB, "full": GIB}, flops=FLOPS, outside=0, head=1)
    words = r"budget_gib = 1.0: with every block recomputed a micro-batch needs 4 GiB"
    with pytest.raises(ConfigError, match=words) as error:
        technique.solved([large])
    sufficient = float(error.value.problems[0].remedy.split()[1])
    with_it = technique.model_copy(update={"budget_bytes": round(sufficient * GIB)})
    assert with_it.solved([large]).modes(2) == ("full", "full")
    assert technique.solved([rank_of(2, kept=KEPT, flops=FLOPS)]).modes(2) == ("none", "none")


class Block(nn.Module):
    gradient_checkpointing = True

    def forward(self, hidden):
        return hidden


def context(model, blocks, *, compiled, sequence):
    techniques = (TensorParallel(sequence_parallel=sequence), Compile(enabled=compiled))
    return TechniqueContext(Layout(), techniques, model=model, blocks=blocks)


@pytest.mark.parametrize(
    ("technique", "compiled", "sequence", "words"),
    [
        (Recompute(mode="full"), False, False, "already recomputes"),
        (Recompute(mode="selective"), True, False, "the compiler replaces the operators"),
        (
            Recompute(mode="full", partition_inputs=True),
            False,
            True,
            "already shards a block's input over tp",
        ),
        (Recompute(mode="selective", keep=("mm",)), False, False, "no such operator"),
    ],
)
def test_refusals(technique, compiled, sequence, words):
    model = nn.Sequential(Block(), Block())
    if words != "already recomputes":
        for block in model:
            block.gradient_checkpointing = False
    with pytest.raises((ConfigError, ModelError), match=words):
        technique.check(context(model, ("0", "1"), compiled=compiled, sequence=sequence))
    Recompute().check(context(model, (), compiled=True, sequence=True))


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ModelError, match="no repeated blocks"):
        Recompute(mode="full").check(context(nn.Linear(2, 2), (), compiled=False, sequence=False))


class Counting(nn.Module):
    """A block whose forward changes its state.

    Buffers change in place, uncounted by torch, by assignment, and by the power iterations of a parametrization. Attributes are a number,
    lists, a tensor that is assigned, one that changes in place, and one that a forward adds.
    """

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("still", torch.ones(4))
        self.calls, self.history, self.seen = 0, [], {}
        self.level, self.last = torch.zeros(4), None

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
    """A recomputation starts from the forward's state and leaves its result: the bits are those without recompute."""

    def run(technique):
        torch.manual_seed(0)
        model = nn.Sequential(Counting(), Counting())
        if technique is not None:
            technique.apply(Parts(model=model, blocks=("0", "1")), SimpleNamespace())
        model.eval()
        model(torch.randn(3, 4)).sum().backward()
        model.train()
        for _ in range(2):
            # Two micro-batches are in flight.
            first, second = (model(torch.randn(3, 4)) for _ in range(2))
            first.square().sum().backward(retain_graph=True)
            second.square().sum().backward()
            first.sum().backward()
        state = [torch.tensor([block.calls, *block.history, block.added]) for block in model]
        state += [tensor for block in model for tensor in (block.level, block.last)]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [*gradients, *model.buffers(), *state]

    for actual, expected in zip(run(Recompute(mode=mode)), run(None), strict=True):
        assert torch.equal(actual, expected)


def noted(forward):

    @functools.wraps(forward)
    def wrapper(self, x):
        self.calls += 1
        return forward(self, x)

    return wrapper


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.calls = nn.Linear(4, 4), 0

    @noted
    def forward(self, x):
        return x + self.line(x).tanh()


def test_recomputed_blocks_get_their_own_forward_back():
    """Decorators of the forward stay: only the wrapper of recompute is removed."""
    model = nn.Sequential(*(Decorated() for _ in range(3)))
    data = torch.randn(2, 4)
    parallel = {"recompute": {"mode": "full"}, "blocks": ["0", "1", "2"]}
    config = {"train_micro_batch_size_per_gpu": 2, "parallel": parallel}
    loss = plait.per_sample(lambda out, batch: out.square().sum())
    engine = plait.initialize(model, config, loss_fn=loss)
    assert all("forward" in vars(block) for block in model)
    engine.close()
    before = [block.calls for block in model]
    assert model(data).shape == data.shape
    assert [block.calls for block in model] == [count + 1 for count in before]


class BeginsLater(nn.Linear):
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


def test_a_tensor_that_begins_to_change_is_named():
    """The remedy of the message works."""
    model = nn.Sequential(BeginsLater())
    Recompute(mode="full").apply(Parts(model=model, blocks=("0",)), SimpleNamespace())
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
    words = 'total of a BeginsLater .* parallel.recompute.mode = "none"'
    with pytest.raises(InputError, match=words):
        model(torch.randn(3, 4))
    model = nn.Sequential(BeginsLater())
    Recompute(mode="none").apply(Parts(model=model, blocks=("0",)), SimpleNamespace())
    for _ in range(4):
        model(torch.randn(3, 4)).sum().backward()
