"""A GPT trained as in nanoGPT.

Weight decay by dimension, a cosine rate by hand, require_backward_grad_sync. Imports no Plait.
"""

import json
import math
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

block_size = 12
batch_size = 2
max_iters = 6
gradient_accumulation_steps = 4
learning_rate = 1e-2
min_lr = 1e-3
warmup = 2


class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n)
        self.c_attn = nn.Linear(n, 3 * n, bias=False)
        self.c_proj = nn.Linear(n, n, bias=False)
        self.ln_2 = nn.LayerNorm(n)
        self.c_fc = nn.Linear(n, 4 * n, bias=False)
        self.c_out = nn.Linear(4 * n, n, bias=False)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2)
            for t in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        x = x + self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab=64, n=32):
        super().__init__()
        self.wte = nn.Embedding(vocab, n)
        self.wpe = nn.Embedding(block_size, n)
        self.h = nn.ModuleList(Block(n) for _ in range(2))
        self.ln_f = nn.LayerNorm(n)
        self.lm_head = nn.Linear(n, vocab, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / (warmup + 1)
    return min_lr + 0.5 * (1 + math.cos(math.pi * (it - warmup) / (max_iters - warmup))) * (
        learning_rate - min_lr
    )


init_process_group(backend="gloo")
rank = int(os.environ["RANK"])
world = int(os.environ["WORLD_SIZE"])
gradient_accumulation_steps //= world
torch.manual_seed(1337)
text = torch.randint(0, 64, (4096,))
model = GPT()
model = DDP(model)
decay = [p for p in model.parameters() if p.dim() >= 2]
no_decay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
    lr=learning_rate,
)
sampler = torch.Generator().manual_seed(1337 + rank)
losses = []
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        at = torch.randint(len(text) - block_size, (batch_size,), generator=sampler)
        x, y = (
            torch.stack([text[i + shift : i + shift + block_size] for i in at]) for shift in (0, 1)
        )
        logits, loss = model(x, y)
        (loss / gradient_accumulation_steps).backward()
        losses.append(loss.item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print("\nRESULT " + json.dumps([rank, losses]), flush=True)
destroy_process_group()
