"""A DeepSpeed script with torch's optimizer.

It has parameter groups, a schedule and frozen layers. Imports no Plait.
"""

import json

import deepspeed
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.3,
}


def main():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 20))
    net[0].requires_grad_(False)
    weights = [p for p in net.parameters() if p.requires_grad and p.ndim > 1]
    biases = [p for p in net.parameters() if p.requires_grad and p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": 0.1},
            {"params": biases, "lr": 0.03, "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    draw = torch.Generator().manual_seed(2)
    losses = []
    rates = []
    boundaries = []
    for _ in range(10):
        tokens = torch.randint(0, 20, (2, 4), generator=draw)[engine.global_rank].to(engine.device)
        loss = nn.functional.cross_entropy(engine(tokens), (tokens + 1) % 20)
        engine.backward(loss)
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
        losses.append(loss.item())
        rates.append(schedule.get_last_lr())
    print(
        "\nRESULT "
        + json.dumps(
            [engine.global_rank, losses, rates, boundaries, float(engine.get_global_grad_norm())]
        ),
        flush=True,
    )


main()
