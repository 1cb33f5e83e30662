"""DistributedDataParallel with find_unused_parameters.

Every second step leaves out a branch. Imports no Plait.
"""

import json

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 12), nn.GELU())
        self.heads = nn.ModuleDict({"sum": nn.Linear(12, 1), "kind": nn.Linear(12, 3)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


dist.init_process_group(backend="gloo", init_method="env://")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(TwoTasks(), find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
draw = torch.Generator().manual_seed(10 + rank)
losses = []
for step in range(8):
    x = torch.randn(4, 6, generator=draw)
    if step % 2:
        loss = nn.functional.cross_entropy(model(x, "kind"), x[:, :3].argmax(1))
    else:
        loss = nn.functional.mse_loss(model(x, "sum"), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
unused = [name for name, parameter in model.module.named_parameters() if parameter.grad is None]
print("\nRESULT " + json.dumps([rank, losses, unused]), flush=True)
dist.destroy_process_group()
