"""The code of docs/how-to/contrastive-losses.md equals one process with all pairs, in float64."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait.verify.keep_float64 import keeping_float64
from tests.parity.full_tensors import full_weights
from tests.parity.mean_losses import close

PAGE = Path(__file__).parents[2] / "docs/how-to/contrastive-losses.md"
STEPS = 3
PAIRS = 2
ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-2)"
SGD = "torch.optim.SGD(model.parameters(), lr=1e-1)"


class ClipFeatures(nn.Module):
    """Transformers' CLIP, whose features and scale are its output."""

    def __init__(self):
        from transformers import CLIPConfig, CLIPModel

        super().__init__()
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        torch.manual_seed(5)
        config = CLIPConfig(
            text_config={**sizes, "vocab_size": 32, "max_position_embeddings": 8},
            vision_config={**sizes, "image_size": 8, "patch_size": 4},
            projection_dim=12,
        )
        self.clip = CLIPModel(config)
        self.to(torch.float64)

    def forward(self, **batch):
        output = self.clip(**batch)
        return SimpleNamespace(
            image_embeds=output.image_embeds,
            text_embeds=output.text_embeds,
            # A view would be read after the parameter is a shard again.
            logit_scale=self.clip.logit_scale + 0,
        )


def pairs(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {
        "input_ids": torch.randint(3, 32, (PAIRS, 6), generator=generator),
        "pixel_values": torch.randn(PAIRS, 3, 8, 8, generator=generator, dtype=torch.float64),
    }


def run_page(rank, world, stage):
    """Return losses and weights of the page's code at a ZeRO stage. Runs on every rank."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    # AdamW would enlarge the rounding of gradients that are almost zero.
    code = code.replace(ADAMW, SGD)
    assert '"stage": 2' in code and SGD in code
    model = ClipFeatures()
    batches = [pairs(step, rank) for step in range(STEPS)]
    names: dict[str, Any] = {"model": model, "batches": batches}
    with keeping_float64(model):
        exec(code.replace('"stage": 2', f'"stage": {stage}'), names)
    weights = full_weights(model)
    names["sharded"].close()
    return names["losses"], weights


@pytest.fixture(scope="module")
def reference():
    """Losses and weights of one process that has all pairs."""
    model = ClipFeatures()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    losses = []
    with keeping_float64(model):
        for step in range(STEPS):
            first = pairs(step, 0)
            second = pairs(step, 1)
            output = model(**{key: torch.cat([first[key], second[key]]) for key in first})
            images = F.normalize(output.image_embeds, dim=-1)
            texts = F.normalize(output.text_embeds, dim=-1)
            logits = output.logit_scale.exp() * images @ texts.T
            target = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, full_weights(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_page_equals_one_process(pool, reference, stage):
    results = pool.run(2, run_page, stage)
    expected_losses, expected_weights = reference
    losses = torch.tensor([losses for losses, _ in results], dtype=torch.float64).mean(0)
    torch.testing.assert_close(losses.tolist(), expected_losses, rtol=0, atol=1e-10)
    for _, weights in results:
        close(weights, expected_weights, atol=1e-10)
