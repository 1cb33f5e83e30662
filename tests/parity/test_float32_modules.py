"""Modules that stay in float32 in a bfloat16 model: BatchNorm and `keep_in_fp32_modules`."""

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
    """A language model that records dtypes.

    Attributes:
        dtypes: Dtypes of (input, weight, output) in the last forward, keyed by module name.
    """

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


def config_with_float32_modules(stage, pattern):
    data_types = {"keep_in_fp32_modules": [pattern]}
    return settings(2, stage, 1, 1, bf16={"enabled": True}, data_types=data_types)


def train(rank, world, stage):
    """Train on the same rows on all ranks. Runs on every rank."""
    model = build()
    engine = plait.initialize(
        model, config_with_float32_modules(stage, "blocks.1.gate"), loss_fn=plait.causal_lm_loss
    )
    losses = []
    for step in cases.ragged_steps(1, steps=3, keys=()):
        losses.append(float(engine.train_batch([step[0]])))
    return losses, model.dtypes, model.blocks[0].norm.running_mean


def reference():
    """Train in one process that casts by hand."""
    model = build()
    optimizer = cases.adamw(list(model.parameters()))
    losses = []
    for (micro_batch,) in cases.ragged_steps(1, steps=3, keys=()):
        hidden = F.embedding(micro_batch["input_ids"], model.embed.weight.bfloat16())
        for index, block in enumerate(model.blocks):
            up = F.linear(hidden, block.up.weight.bfloat16(), block.up.bias.bfloat16())
            inner = block.norm(up.float().flatten(0, 1)).bfloat16().view_as(hidden)
            if index == 1:
                gate = F.linear(hidden.float(), block.gate.weight, block.gate.bias).bfloat16()
            else:
                gate = F.linear(hidden, block.gate.weight.bfloat16(), block.gate.bias.bfloat16())
            hidden = hidden + inner * gate.sigmoid()
        logits = F.linear(hidden, model.head.weight.bfloat16(), model.head.bias.bfloat16())
        total, weight = plait.causal_lm_loss(cases.Output(logits), micro_batch)
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
        in_bfloat16 = {name for name, used in dtypes.items() if set(used) == {torch.bfloat16}}
        in_float32 = dtypes.keys() - in_bfloat16
        assert in_float32 == {"blocks.0.norm", "blocks.1.norm", "blocks.1.gate"}
        for name in in_float32:
            # The output is cast for the next module, before or after a user's hook sees it.
            assert dtypes[name][:2] == (torch.float32, torch.float32)
            assert dtypes[name][2] in (torch.float32, torch.bfloat16)
        assert mean.dtype == torch.float32 and mean.abs().max() > 0
        assert losses == pytest.approx(expected, rel=2e-3)


def pattern_without_match(rank, world):
    """Return the message of the refusal. Runs on every rank."""
    config = config_with_float32_modules(1, "gates")
    with pytest.raises(ModelError) as error:
        plait.initialize(build(), config, loss_fn=plait.causal_lm_loss)
    return str(error.value)


def test_a_name_that_matches_nothing_is_refused(pool):
    for message in pool.run(2, pattern_without_match):
        assert "no module of NormalisedModel matches 'gates'" in message
