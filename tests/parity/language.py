"""Language models on real text, Python's own sources as bytes, for questions of convergence."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import plait

LENGTH = 64
SAMPLES = 8
MODULES = (
    "argparse",
    "ast",
    "asyncio/base_events",
    "collections/__init__",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "inspect",
    "typing",
)
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}}


@cache
def text():
    """Return the sources as one uint8 tensor."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / f"{name}.py" for name in MODULES]
    content = b"".join(path.read_bytes() for path in paths if path.exists())
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def batch(step, rank):
    """Return a batch of [SAMPLES, LENGTH] that differs for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(0, text().numel() - LENGTH, (SAMPLES,), generator=generator)
    ids = torch.stack([text()[start : start + LENGTH] for start in starts.tolist()]).long()
    return {"input_ids": ids, "labels": ids}


def losses(rank, world, parallel, stage, steps, optimizer=ADAMW, width=64):
    """Return the loss of every step of a Llama with 0.15 M parameters. Runs on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config = AutoConfig.for_model(
        "llama",
        vocab_size=256,
        tie_word_embeddings=False,
        hidden_size=width,
        intermediate_size=5 * width // 2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "zero_optimization": {"stage": stage},
        "optimizer": optimizer,
        "parallel": {
            "dp_replicate": 1 if stage else world,
            "dp_shard": world if stage else 1,
            **parallel,
        },
        "run": {"seed": 1},
    }
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    return [float(engine.train_batch(batch(step, rank))) for step in range(steps)]


class Bigrams(torch.nn.Module):
    """A table whose rows are the logits of the next byte.

    The problem is convex, so runs differ by their gradients and not by chance.
    """

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Embedding(256, 256)])

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.blocks[0](input_ids))


def bigram_losses(rank, world, parallel, steps):
    """Return the loss of every step of gradient descent on a fixed text. Runs on every rank."""
    model = Bigrams()
    torch.nn.init.zeros_(model.blocks[0].weight)
    config = {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 10.0}},
        "parallel": {"dp_replicate": world, **parallel},
    }
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    ids = text()[rank * 4096 : rank * 4096 + 4096].long().view(32, 128)
    return [float(engine.train_batch({"input_ids": ids, "labels": ids})) for _ in range(steps)]
