"""FSDP2 as in torchtitan.

It has fully_shard of every block, clipping, and the full state dict for the first process.
Imports no Plait.
"""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Block(32) for _ in range(3))
        self.output = nn.Linear(32, 64, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
    draw = torch.Generator().manual_seed(1)
    losses = []
    norms = []
    for _ in range(8):
        ids = torch.randint(0, 64, (dist.get_world_size(), 2, 12), generator=draw)[dist.get_rank()]
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    full = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    total = {name: tensor.double().abs().sum().item() for name, tensor in full.items()}
    print("\nRESULT " + json.dumps([dist.get_rank(), losses, norms, total]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
