"""The code of docs/how-to/contrastive-losses.md trains as one process does that has all pairs, in float64."""

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
from plait.verify.parity import full_tensor_on_cpu
from tests.parity.mean_losses import close

PAGE = Path(__file__).parents[2] / "docs/how-to/contrastive-losses.md"
STEPS, ROWS = 3, 2
ADAMW = "torch.optim.AdamW(model.parameters(), lr=1e-2)"
SGD = "torch.optim.SGD(model.parameters(), lr=1e-1)"


class Pairs(nn.Module):
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
        self.clip = CLIPModel(
            CLIPConfig(
                text_config={**sizes, "vocab_size": 32, "max_position_embeddings": 8},
                vision_config={**sizes, "image_size": 8, "patch_size": 4},
                projection_dim=12,
            )
        )
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
    """Pairs of one process."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    return {
        "input_ids": torch.randint(3, 32, (ROWS, 6), generator=draw),
        "pixel_values": torch.randn(ROWS, 3, 8, 8, generator=draw, dtype=torch.float64),
    }


def on_the_page(rank, world, stage):
    """Losses and weights of the page's code at a ZeRO stage. Runs in a worker."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    # AdamW would enlarge the rounding of gradients that are almost zero.
    code = code.replace(ADAMW, SGD)
    assert '"stage": 2' in code and SGD in code
    model = Pairs()
    names: dict[str, Any] = {
        "model": model,
        "batches": [pairs(step, rank) for step in range(STEPS)],
    }
    with keeping_float64(model):
        exec(code.replace('"stage": 2', f'"stage": {stage}'), names)
    weights = {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}
    names["sharded"].close()
    return names["losses"], weights


@pytest.fixture(scope="module")
def reference():
    """CLIP's loss of all pairs in one process."""
    model = Pairs()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    losses = []
    with keeping_float64(model):
        for step in range(STEPS):
            parts = [pairs(step, rank) for rank in range(2)]
            output = model(**{key: torch.cat([part[key] for part in parts]) for key in parts[0]})
            images = F.normalize(output.image_embeds, dim=-1)
            logits = output.logit_scale.exp() * images @ F.normalize(output.text_embeds, dim=-1).T
            target = torch.arange(len(logits))
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_page_is_one_process(pool, reference, stage):
    results = pool.run(2, on_the_page, stage)
    means = torch.tensor([losses for losses, _ in results], dtype=torch.float64).mean(0)
    wanted_losses = torch.tensor(reference[0], dtype=torch.float64)
    torch.testing.assert_close(means, wanted_losses, rtol=0, atol=1e-10)
    for _, weights in results:
        close(weights, reference[1], atol=1e-10)
