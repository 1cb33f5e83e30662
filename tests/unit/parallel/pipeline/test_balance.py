"""Stages against all possible cuts, and the costs of models whose numbers are known."""

import time
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plait.errors import InputError, ModelError
from plait.model.blocks import find_blocks
from plait.model.facts import ModelFacts, model_facts
from plait.parallel.pipeline.estimates import (
    ForwardCosts,
    balance_stages,
    forward_costs,
    imbalance,
    stage_costs,
)

costs = st.one_of(
    st.integers(0, 20), st.floats(0, 100, allow_nan=False), st.sampled_from([0.1, 0.2, 0.3])
)


def all_cuts(blocks, stages):
    """Yield every way to give each stage at least one block."""
    for inner in combinations(range(1, blocks), stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *inner, blocks)))


@settings(deadline=None)
@given(st.data(), st.lists(costs, min_size=1, max_size=9), costs, costs)
def test_no_cut_is_better(data, blocks, first, last):
    stages = data.draw(st.integers(1, len(blocks)))
    balanced = balance_stages(blocks, stages, first=first, last=last)
    assert len(balanced) == stages
    assert sum(balanced) == len(blocks)
    assert min(balanced) >= 1

    def longest(sizes):
        return max(stage_costs(blocks, sizes, first=first, last=last))

    best = min(map(longest, all_cuts(len(blocks), stages)))
    assert longest(balanced) == pytest.approx(best, rel=1e-12, abs=0)


@given(st.integers(1, 60), st.data())
def test_equal_blocks(blocks, data):
    """Stages have the quotient of blocks or one more. Larger stages are the last ones."""
    stages = data.draw(st.integers(1, blocks))
    cost = data.draw(st.sampled_from([1, 0.1, 1e15, 1e-3]))
    sizes = [blocks // stages + (stage < blocks % stages) for stage in range(stages)]
    assert list(balance_stages([cost] * blocks, stages)) == sorted(sizes)


@pytest.mark.parametrize(
    ("blocks", "stages", "first", "last", "expected"),
    [
        ([1] * 10, 4, 0, 0, (2, 2, 3, 3)),
        ([1] * 32, 4, 0, 2.4, (8, 9, 9, 6)),
        ([1] * 8, 4, 0, 6, (2, 2, 3, 1)),
        ([1] * 8, 4, 6, 0, (1, 2, 2, 3)),
        ([5, 1, 1, 1, 1, 1], 3, 0, 0, (1, 2, 3)),
        ([0, 0, 0, 0], 2, 0, 0, (3, 1)),
        ([3, 0, 0, 3], 2, 0, 0, (3, 1)),
    ],
)
def test_cuts(blocks, stages, first, last, expected):
    assert balance_stages(blocks, stages, first=first, last=last) == expected


def test_floats_are_compared_exactly():
    """The binary 0.1 + 0.2 is more than 0.3."""
    assert balance_stages([0.1, 0.2, 0.3, 0.3], 3) == (2, 1, 1)
    assert balance_stages([1e-300, 1e300, 1e-300], 2) == (1, 2)


def test_many_blocks_and_stages():
    """All twelve cases take well under a second. The limit leaves room for a slow machine."""
    start = time.process_time()
    uneven = [float(1 + index * 7919 % 101) for index in range(1000)]
    for blocks in ([1.0] * 1000, uneven, [0.0] * 999 + [1.0]):
        for stages in (2, 17, 512, 1000):
            assert sum(balance_stages(blocks, stages, first=0.5, last=12.25)) == 1000
    assert time.process_time() - start < 5


def test_wrong_arguments():
    message = "5 pipeline stages and 4 blocks: every stage needs a block; use 1 to 4 stages"
    with pytest.raises(InputError, match=message):
        balance_stages([1, 1, 1, 1], 5)
    with pytest.raises(InputError):
        balance_stages([1, 1], 0)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="be finite and at least 0"):
            balance_stages([1, bad], 1)
        with pytest.raises(InputError, match="be finite and at least 0"):
            balance_stages([1, 1], 1, last=bad)


def test_imbalance():
    assert imbalance(stage_costs([1] * 8, (2, 2, 2, 2))) == 1
    assert imbalance(stage_costs([1] * 8, (2, 2, 3, 1), last=2)) == pytest.approx(3 / 2.5)
    assert imbalance([0, 0]) == 1


class Llama(nn.Module):
    """Model with embedding, blocks, norm and head in the order of a Llama."""

    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        layers = ((nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(3))
        self.layers = nn.ModuleList(nn.Sequential(*block) for block in layers)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head(tied):
    """The lookup is free. The head is a product with vocab x hidden weights on the last stage."""
    model = Llama(tied)
    expected = ForwardCosts((2.0 * 2 * 8 * 16,) * 3, 0.0, 2.0 * 50 * 8)
    assert forward_costs(model_facts(model, find_blocks(model))) == expected
    assert balance_stages(expected.blocks, 2, first=expected.first, last=expected.last) == (2, 1)


def test_convolutions_and_shared_blocks():
    """A patch embedding is a product. A weight that all blocks share counts in each block."""
    block = nn.Linear(4, 4)
    model = nn.ModuleDict({"patches": nn.Conv2d(3, 4, 2), "blocks": nn.ModuleList([block, block])})
    expected = ForwardCosts((32.0, 32.0), 2.0 * 4 * 3 * 4, 0.0)
    assert forward_costs(model_facts(model, ("blocks.0", "blocks.1"))) == expected


def test_costs_of_a_published_model():
    """Llama-3 8B has 218,103,808 weights per block and a head as costly as 2.4 blocks."""
    attention = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)]
    shapes = [*attention, (4096, 14336), (4096, 14336), (14336, 4096)]
    model = nn.ModuleDict()
    with torch.device("meta"):
        model["embed"] = nn.Embedding(128256, 4096)
        model["layers"] = nn.ModuleList()
        for _ in range(32):
            block = nn.ModuleList(nn.Linear(inner, outer, bias=False) for inner, outer in shapes)
            model["layers"].append(block)
        model["head"] = nn.Linear(4096, 128256, bias=False)

    costs = forward_costs(model_facts(model, find_blocks(model)))
    assert costs == ForwardCosts((2.0 * 218_103_808,) * 32, 0.0, 2.0 * 525_336_576)
    sizes = balance_stages(costs.blocks, 4, first=costs.first, last=costs.last)
    assert sizes == (8, 9, 9, 6)
    costs_by_stage = stage_costs(costs.blocks, sizes, first=costs.first, last=costs.last)
    assert imbalance(costs_by_stage) == pytest.approx(9 / 8.602, abs=0.001)


def test_no_blocks():
    with pytest.raises(ModelError, match=r"parallel\.blocks"):
        forward_costs(ModelFacts((), ()))
