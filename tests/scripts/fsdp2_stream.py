"""FSDP2 over an iterable data set that every process cuts for itself.

It has an EMA of the weights and a cosine schedule. Imports no Plait.
"""

import copy
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset


class Series(IterableDataset):
    """Windows of a long series: the process with this rank has every WORLD-th."""

    def __init__(self, rank, world, length=12):
        self.rank = rank
        self.world = world
        self.length = length

    def __iter__(self):
        draw = torch.Generator().manual_seed(7)
        for number in range(64):
            start, step = torch.rand(2, generator=draw)
            window = torch.sin(6 * start + (0.3 + step) * torch.arange(self.length + 1))
            if number % self.world == self.rank:
                yield window[:-1, None], window[-1:]


class Predictor(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.start = nn.Linear(1, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True) for _ in range(2)
        )
        self.end = nn.Linear(width, 1)

    def forward(self, x):
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x[:, -1])


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Predictor()
average = copy.deepcopy(model).requires_grad_(False)
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
losses = []
rates = []
for x, y in DataLoader(Series(dist.get_rank(), dist.get_world_size()), batch_size=4):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    for averaged, parameter in zip(average.parameters(), model.parameters(), strict=True):
        averaged.lerp_(parameter.full_tensor(), 0.1)
    losses.append(loss.item())
    rates.append(schedule.get_last_lr()[0])
average.eval()
predicted = average(torch.sin(torch.arange(12.0))[None, :, None]).item()
print("\nRESULT " + json.dumps([dist.get_rank(), losses, rates, predicted]), flush=True)
dist.destroy_process_group()
