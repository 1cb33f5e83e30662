"""DeepSpeed at stage 2.

A checkpoint with a client state, a second engine that loads it and goes on. Imports no Plait.
"""

import json
import sys

import deepspeed
import torch
from torch import nn

config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.99], "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 12, "warmup_num_steps": 2, "warmup_max_lr": 0.02},
    },
}


def build():
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 2))
    return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)


def train(engine, first, last):
    losses = []
    for step in range(first, last):
        x = torch.randn(2, 2, 6, generator=torch.Generator().manual_seed(step))[
            engine.global_rank
        ].to(engine.device)
        loss = nn.functional.cross_entropy(engine(x), (x.sum(1) > 0).long())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main():
    deepspeed.init_distributed("gloo")
    engine, *_ = build()
    losses = train(engine, 0, 5)
    engine.save_checkpoint("checkpoints", tag="five", client_state={"next": 5, "note": "half"})
    losses += train(engine, 5, 8)
    again, _, _, schedule = build()
    path, client_state = again.load_checkpoint("checkpoints", tag="five")
    resumed = train(again, client_state["next"], 8)
    assert path is not None and client_state["note"] == "half" and resumed == losses[5:], (
        resumed,
        losses,
    )
    print(
        "\nRESULT "
        + json.dumps(
            [again.global_rank, losses, again.global_steps, again.get_lr(), schedule.get_last_lr()]
        ),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
