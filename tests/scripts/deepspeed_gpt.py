"""A GPT in DeepSpeed's style.

The launcher's --deepspeed_config, gradient accumulation, a checkpoint in the middle.
Imports no Plait.
"""

import argparse
import json
import sys

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class GPT(nn.Module):
    def __init__(self, vocabulary=64, width=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = GPT()
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )
    draw = torch.Generator().manual_seed(1)
    losses = []
    for step in range(8):
        batches = torch.randint(0, 64, (2, 2, 12), generator=draw)  # [ranks, samples, sequence]
        loss = engine(batches[engine.global_rank % 2].to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 3:
            engine.save_checkpoint(args.folder, client_state={"step": step})
    norm = float(engine.get_global_grad_norm())
    path, client = engine.load_checkpoint(args.folder)
    assert path is not None and client["step"] == 3 and engine.global_steps == 2
    print("\nRESULT " + json.dumps([engine.global_rank, losses, norm]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
