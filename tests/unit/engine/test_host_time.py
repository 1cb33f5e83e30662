"""Steps do not walk over all modules, which would take the host longer than a kernel takes."""

from collections import Counter

import pytest
import torch
from torch import nn

import plait

WARM_UP = 12
"""Steps before the counted one. The first steps also check the model and the training loop."""
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def walks(monkeypatch):
    """Count the calls of the functions that walk over all modules or parameters."""
    calls = Counter()

    def counting(name):
        walk = getattr(nn.Module, name)

        def count(*args, **kwargs):
            calls[name] += 1
            return walk(*args, **kwargs)

        return count

    # Every walk of torch's over modules, parameters or buffers goes through one of these.
    for name in ("named_modules", "_named_members"):
        monkeypatch.setattr(nn.Module, name, counting(name))
    return calls


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_engine_walks_over_no_modules(walks, stage, accumulation):
    config = {
        **CONFIG,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": stage > 0},
        "zero_optimization": {"stage": stage},
    }
    engine = plait.initialize(model=Model(), config=config)
    for step in range(WARM_UP + 1):
        if step == WARM_UP:
            walks.clear()
        for _ in range(accumulation):
            engine.backward(engine(torch.ones(1, 4)).mean())
            engine.step()
    engine.close()
    assert not walks


@pytest.mark.parametrize("stage", [0, 3])
def test_a_user_loop_walks_over_no_modules(walks, stage):
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": stage > 0},
        "zero_optimization": {"stage": stage},
    }
    sharded = plait.parallelize(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(WARM_UP + 1):
        if step == WARM_UP:
            walks.clear()
        model(torch.ones(1, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded.close()
    assert not walks
