"""DistributedDataParallel with gradient accumulation in no_sync, clipping and saved weights.

Imports no Plait.
"""

import contextlib
import json
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
ACCUMULATION = 3


def main():
    dist.init_process_group()
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(rank)  # DistributedDataParallel begins with the first rank's weights
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(
        STEPS * ACCUMULATION * world, 4, 8, generator=torch.Generator().manual_seed(5)
    )
    losses = []
    norms = []
    for index, x in enumerate(data[rank::world]):
        last = (index + 1) % ACCUMULATION == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            (loss / ACCUMULATION).backward()
        losses.append(loss.item())
        if last:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    with tempfile.TemporaryFile() as file:
        torch.save(model.module.state_dict(), file)
        file.seek(0)
        saved = sum(tensor.double().sum().item() for tensor in torch.load(file).values())
    print("\nRESULT " + json.dumps([rank, losses, norms, saved]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
