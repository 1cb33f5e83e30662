"""Dropout under tensor and sequence parallelism (defect A19): masks of what all ranks hold are equal, masks of what they split independent,
recomputation repeats them; and with the masks that were drawn, one process computes the same losses and gradients."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity.data_parallel import assert_same, plain_trace
from tests.parity.tensor_parallel import settings

Masks = list[torch.Tensor]
DROPPED = 0.4


class Dropping(nn.Module):
    """Blocks of a norm and an MLP of 25 columns, dropped inside of the MLP and behind it."""

    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Embedding(cases.VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "up": nn.Linear(width, 25),
                    "down": nn.Linear(25, width),
                }
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, cases.VOCABULARY, bias=False)

    def forward(self, input_ids):
        hidden = F.dropout(self.embed(input_ids), DROPPED, self.training)
        for block in self.blocks:
            inner = F.dropout(F.gelu(block["up"](block["norm"](hidden))), DROPPED, self.training)  # type: ignore[index]
            hidden = hidden + F.dropout(block["down"](inner), DROPPED, self.training)  # type: ignore[index]
        return cases.Output(self.head(hidden))


def build(kind):
    """With weights, float64, in training."""
    torch.manual_seed(7)
    if kind == "own":
        return Dropping().double().train()
    from transformers import AutoModelForCausalLM

    config = cases.transformers_config(kind, tied=False)
    config.attention_dropout = DROPPED
    if kind == "gpt_neox":
        config.hidden_dropout = DROPPED
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().train()


def configured(kind, **more):
    plan = {
        "embed": "embedding_rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "vocab_head",
    }
    return settings(2, 2, 0, 1, 1, **({"plan": plan} if kind == "own" else {}), **more)


def data(kind):
    return cases.ragged_steps(1, steps=2, keys=() if kind == "own" else ("attention_mask",))


@contextmanager
def dropping(draw):
    """Every dropout multiplies with what `draw` gives."""

    def dropout(x, p=0.5, training=True, inplace=False):
        return x * draw(x, p) if training and p > 0 else x

    with patch.object(F, "dropout", dropout):
        yield


def run(kind, config):
    """Runs in a worker."""
    masks: Masks = []

    def draw(x, p):
        masks.append((torch.rand(x.shape) >= p).to(x.dtype) / (1 - p))
        return masks[-1]

    model = build(kind)
    with keeping_float64(model), dropping(draw):
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        return engine_trace(engine, data(kind)), masks


def runs(rank, world, kind, sequence):
    """Plainly, and recomputed. Runs in a worker."""
    ways: dict[str, dict[str, Any]] = {"none": {}, "full": {"recompute": {"mode": "full"}}}
    if not sequence:
        ways["selective"] = {"recompute": {"mode": "selective"}}
    return {
        way: run(kind, configured(kind, sequence_parallel=sequence, **more))
        for way, more in ways.items()
    }


def joined(parts, whole):
    """One mask of the parts that the ranks drew. Those that are no parts are equal."""
    if parts[0].shape == whole:
        assert all(torch.equal(part, parts[0]) for part in parts), (
            "what all ranks hold was dropped differently"
        )
        return parts[0]
    dim = next(dim for dim, size in enumerate(whole) if parts[0].shape[dim] != size)
    return torch.cat(parts, dim)


@pytest.mark.parametrize(
    ("kind", "sequence"), [("own", False), ("gpt_neox", False), ("llama", True)]
)
def test_masks(pool, kind, sequence):
    """A19: 13 and 12 columns; heads; tokens of sequences that tp does not divide."""
    found = pool.run(2, runs, kind, sequence)
    by_rank = [ranks["none"][1] for ranks in found]
    assert len(by_rank[0]) == len(by_rank[1])
    calls = iter(list(zip(*by_rank, strict=True)))
    alike = places = 0

    def replay(x, p):
        nonlocal alike, places
        one, other = next(calls)
        if one.shape != x.shape:  # parts: heads, columns or tokens
            common = [slice(0, min(sizes)) for sizes in zip(one.shape, other.shape, strict=True)]
            alike += int((one[common] == other[common]).sum())
            places += one[common].numel()
        return joined([one, other], x.shape)

    model = build(kind)
    with keeping_float64(model), dropping(replay):
        wanted = plain_trace(model, data(kind))
    assert next(calls, None) is None
    assert_same(wanted, found[0]["none"][0])
    expected = DROPPED**2 + (1 - DROPPED) ** 2
    assert abs(alike / places - expected) < 4 * (0.25 / places) ** 0.5, (alike, places)
    for trace, _ in found[0].values():
        assert_same(found[0]["none"][0], trace, bar=1e-12)


class Failing(Dropping):
    """Drops in a split part and fails there; or drops what all ranks hold before another layer of the part reads it."""

    mode = ""

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        block = self.blocks[0]
        inner = F.dropout(block["up"](hidden), 0.5)  # type: ignore[index]
        if self.mode == "fails":
            raise RuntimeError("in a part")
        if self.mode == "late":
            inner = inner + block["up"](F.dropout(hidden, 0.5))  # type: ignore[index]
        return cases.Output(self.head(block["down"](inner)))  # type: ignore[index]


def failing(rank, world):
    """What is said, and what all ranks draw next. Runs in a worker."""
    torch.manual_seed(7)
    model = Failing().train()
    said = []
    engine = plait.initialize(model, configured("own"), loss_fn=plait.causal_lm_loss)
    for mode in ("fails", "late"):
        model.mode = mode
        try:
            engine.train_batch(data("own")[0])
        except Exception as error:
            said.append(str(error))
    return said, torch.rand(4)


def test_a_part_that_ends_by_an_exception(pool):
    """A19: all ranks draw alike behind it; and what would be dropped differently on each rank is refused."""
    (said, first), (_, second) = pool.run(2, failing)
    assert said[0] == "in a part"
    assert "random numbers were drawn (dropout) between two column-parallel layers" in said[1]
    assert torch.equal(first, second)
