"""FSDP2 with gradient accumulation.

It has set_requires_gradient_sync, and a distributed checkpoint of torch in between.
Imports no Plait.
"""

import json

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

ACCUMULATION = 3


def shard(model):
    for layer in model:
        if isinstance(layer, nn.Sequential):
            fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 20), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(9, 20), *blocks, nn.Linear(20, 3))
    shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(dist.get_rank())
    losses = []

    def step():
        for micro in range(ACCUMULATION):
            model.set_requires_gradient_sync(micro == ACCUMULATION - 1)
            x = torch.randn(4, 9, generator=draw)
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)) / ACCUMULATION
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id="checkpoint")
    began = draw.get_state()
    step()
    first = losses[-ACCUMULATION:]
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id="checkpoint")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    draw.set_state(began)
    step()
    assert losses[-ACCUMULATION:] == first
    step()
    print("\nRESULT " + json.dumps([dist.get_rank(), losses]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
