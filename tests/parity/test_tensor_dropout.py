"""Dropout under tensor and sequence parallelism (defect A19).

Masks of what all ranks hold are equal, masks of what they split are independent, and recomputation
repeats them. With the masks that were drawn, one process computes the same losses and gradients.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity.data_parallel import assert_same, plain_trace
from tests.parity.refusals import message_of
from tests.parity.tensor_parallel import plan, settings

DROPPED = 0.4


class DroppingModel(nn.Module):
    """Blocks of a norm and an MLP of 25 columns, with dropout inside of the MLP and after it."""

    def __init__(self, width=12):
        super().__init__()
        self.embed = nn.Embedding(cases.VOCABULARY, width)
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.norm = nn.LayerNorm(width)
            block.up = nn.Linear(width, 25)
            block.down = nn.Linear(25, width)
            self.blocks.append(block)
        self.head = nn.Linear(width, cases.VOCABULARY, bias=False)

    def forward(self, input_ids):
        hidden = F.dropout(self.embed(input_ids), DROPPED, self.training)
        for block in self.blocks:
            inner = F.dropout(F.gelu(block.up(block.norm(hidden))), DROPPED, self.training)
            hidden = hidden + F.dropout(block.down(inner), DROPPED, self.training)
        return cases.Output(self.head(hidden))


def build(kind):
    torch.manual_seed(7)
    if kind == "own":
        return DroppingModel().double().train()
    from transformers import AutoModelForCausalLM

    config = cases.transformers_config(kind, tied=False)
    config.attention_dropout = DROPPED
    if kind == "gpt_neox":
        config.hidden_dropout = DROPPED
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().train()


def config_of(kind, **parallel):
    if kind == "own":
        parallel |= plan("plain")
    return settings(2, 2, 0, 1, 1, **parallel)


def steps(kind):
    return cases.ragged_steps(1, steps=2, keys=() if kind == "own" else ("attention_mask",))


@contextmanager
def dropout_with(draw):
    """Replace dropout by a product with the mask that `draw(x, p)` returns."""

    def dropout(x, p=0.5, training=True, inplace=False):
        return x * draw(x, p) if training and p > 0 else x

    with patch.object(F, "dropout", dropout):
        yield


def train(kind, config):
    """Return the trace and the masks of all dropouts of this rank."""
    masks = []

    def draw(x, p):
        masks.append((torch.rand(x.shape) >= p).to(x.dtype) / (1 - p))
        return masks[-1]

    model = build(kind)
    with keeping_float64(model), dropout_with(draw):
        return engine_trace(cases.engine(model, config), steps(kind)), masks


def train_with_recompute(rank, world, kind, sequence):
    """Train without and with recompute. Runs on every rank."""
    runs = {"none": train(kind, config_of(kind, sequence_parallel=sequence))}
    for mode in ("full",) if sequence else ("full", "selective"):
        config = config_of(kind, sequence_parallel=sequence, recompute={"mode": mode})
        runs[mode] = train(kind, config)
    return runs


def full_mask(masks, shape):
    """Return the mask of the full tensor from the masks of all ranks."""
    if masks[0].shape == shape:
        message = "what all ranks hold was dropped differently"
        assert all(torch.equal(mask, masks[0]) for mask in masks), message
        return masks[0]
    dim = next(dim for dim, size in enumerate(shape) if masks[0].shape[dim] != size)
    return torch.cat(masks, dim)


@pytest.mark.parametrize(
    ("kind", "sequence"), [("own", False), ("gpt_neox", False), ("llama", True)]
)
def test_masks(pool, kind, sequence):
    """Splits are of 13 and 12 columns, of heads, and of tokens that tp does not divide."""
    first, second = pool.run(2, train_with_recompute, kind, sequence)
    masks = iter(list(zip(first["none"][1], second["none"][1], strict=True)))
    equal = 0
    compared = 0

    def replay(x, p):
        nonlocal equal, compared
        mask, other = next(masks)
        if mask.shape != x.shape:
            # Shards may differ in size, so only the common part is compared.
            common = [slice(0, min(sizes)) for sizes in zip(mask.shape, other.shape, strict=True)]
            equal += int((mask[common] == other[common]).sum())
            compared += mask[common].numel()
        return full_mask([mask, other], x.shape)

    model = build(kind)
    with keeping_float64(model), dropout_with(replay):
        expected = plain_trace(model, steps(kind))
    assert next(masks, None) is None
    trace = first["none"][0]
    assert_same(expected, trace)

    # Independent masks agree as often as two draws do, within four standard deviations.
    probability = DROPPED**2 + (1 - DROPPED) ** 2
    assert abs(equal / compared - probability) < 4 * (0.25 / compared) ** 0.5, (equal, compared)
    for recomputed, _ in first.values():
        assert_same(trace, recomputed, bar=1e-12)


class FailingModel(DroppingModel):
    """Fails between two split layers, or drops there what another split layer reads."""

    mode = ""

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        block = self.blocks[0]
        inner = F.dropout(block.up(hidden), 0.5)
        if self.mode == "fails":
            raise RuntimeError("between split layers")
        if self.mode == "late":
            inner = inner + block.up(F.dropout(hidden, 0.5))
        return cases.Output(self.head(block.down(inner)))


def fail_between_split_layers(rank, world):
    """Return the messages, and the next random numbers. Runs on every rank."""
    torch.manual_seed(7)
    model = FailingModel().train()
    engine = cases.engine(model, config_of("own"))
    messages = []
    for mode in ("fails", "late"):
        model.mode = mode
        messages.append(message_of(engine.train_batch, steps("own")[0], error=Exception))
    return messages, torch.rand(4)


def test_ranks_draw_alike_after_an_exception(pool):
    """Dropping the same activations differently on each rank is refused."""
    (messages, first), (_, second) = pool.run(2, fail_between_split_layers)
    assert messages[0] == "between split layers"
    assert "random numbers were drawn (dropout) between two column-parallel layers" in messages[1]
    assert torch.equal(first, second)
