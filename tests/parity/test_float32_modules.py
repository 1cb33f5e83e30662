"""Modules that compute in float32 in a model that computes in bfloat16: BatchNorm, and those that the file names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait.errors import ModelError
from tests.parity import cases
from tests.parity.data_parallel import settings


class NormalisedBlock(nn.Module):
    """A linear layer, BatchNorm over all tokens, and a second linear layer."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.gate = nn.Linear(width, width)

    def forward(self, hidden):
        inner = self.norm(self.up(hidden).flatten(0, 1)).view_as(hidden)
        return hidden + inner * self.gate(hidden).sigmoid()


class NormalisedModel(nn.Module):
    """A language model of such blocks. `dtypes` are those of the last forward, by module."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(cases.VOCABULARY, 12)
        self.blocks = nn.ModuleList(NormalisedBlock(12) for _ in range(2))
        self.head = nn.Linear(12, cases.VOCABULARY)
        self.dtypes: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {}
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.BatchNorm1d):
                module.register_forward_hook(
                    lambda module, args, output, name=name: self._note(name, module, args, output)
                )

    def _note(self, name, module, args, output):
        self.dtypes[name] = args[0].dtype, module.weight.dtype, output.dtype

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return cases.Output(self.head(hidden))


def build():
    """The model, with the same weights on every call."""
    torch.manual_seed(7)
    return NormalisedModel()


def train(rank, world, stage):
    """Runs in a worker. All ranks train on the same rows."""
    config = settings(
        2,
        stage,
        1,
        1,
        bf16={"enabled": True},
        data_types={"keep_in_fp32_modules": ["blocks.1.gate"]},
    )
    model = build()
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    losses = [
        float(engine.train_batch([step[0]])) for step in cases.ragged_steps(1, steps=3, keys=())
    ]
    return losses, model.dtypes, model.blocks[0].norm.running_mean


def reference():
    """One process that casts by hand."""
    model = build()
    optimizer = cases.adamw(list(model.parameters()))
    losses = []
    for (piece,) in cases.ragged_steps(1, steps=3, keys=()):
        hidden = F.embedding(piece["input_ids"], model.embed.weight.bfloat16())
        for index, block in enumerate(model.blocks):
            up = F.linear(hidden, block.up.weight.bfloat16(), block.up.bias.bfloat16())
            inner = block.norm(up.float().flatten(0, 1)).bfloat16().view_as(hidden)
            if index == 1:
                gate = F.linear(hidden.float(), block.gate.weight, block.gate.bias).bfloat16()
            else:
                gate = F.linear(hidden, block.gate.weight.bfloat16(), block.gate.bias.bfloat16())
            hidden = hidden + inner * gate.sigmoid()
        logits = F.linear(hidden, model.head.weight.bfloat16(), model.head.bias.bfloat16())
        total, weight = plait.causal_lm_loss(cases.Output(logits), piece)
        loss = total / weight
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_named_modules_compute_in_float32(pool, stage):
    expected = reference()
    for losses, dtypes, mean in pool.run(2, train, stage):
        kept = {
            name
            for name, used in dtypes.items()
            if used == (torch.float32, torch.float32, torch.bfloat16)
        }
        cast = {name for name, used in dtypes.items() if set(used) == {torch.bfloat16}}
        # A hook of the user's sees a module's output before it is cast for the next one.
        kept |= {name for name, used in dtypes.items() if set(used) == {torch.float32}}
        assert kept == {"blocks.0.norm", "blocks.1.norm", "blocks.1.gate"}
        assert kept | cast == dtypes.keys()
        assert mean.dtype == torch.float32 and mean.abs().max() > 0
        assert losses == pytest.approx(expected, rel=2e-3)


def name_nothing(rank, world):
    """Runs in a worker."""
    config = settings(
        2, 1, 1, 1, bf16={"enabled": True}, data_types={"keep_in_fp32_modules": ["gates"]}
    )
    with pytest.raises(ModelError) as caught:
        plait.initialize(build(), config, loss_fn=plait.causal_lm_loss)
    return str(caught.value)


def test_a_name_that_matches_nothing_is_refused(pool):
    for message in pool.run(2, name_nothing):
        assert "no module of NormalisedModel matches 'gates'" in message
