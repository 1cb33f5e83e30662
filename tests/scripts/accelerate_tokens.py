"""Accelerate's recipe for accumulation by tokens.

The loss is a sum, divided by the step's tokens over all ranks. Imports no Plait.
"""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

set_seed(3)
accelerator = Accelerator(gradient_accumulation_steps=3)
draw = torch.Generator().manual_seed(1)
texts = [torch.randint(1, 64, (6 + (5 * i) % 7,), generator=draw) for i in range(48)]
collate = lambda batch: torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)  # noqa: E731
loader = DataLoader(texts, batch_size=2, collate_fn=collate)
shape = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
criterion = CrossEntropyLoss(reduction="sum", ignore_index=0)
batches = iter(loader)
losses = []
logged = []
for _ in range(len(loader) // accelerator.gradient_accumulation_steps):
    step = [next(batches) for _ in range(accelerator.gradient_accumulation_steps)]
    tokens = (
        accelerator.gather(torch.tensor(sum((ids[:, 1:] != 0).sum() for ids in step))).sum().item()
    )
    total = 0.0
    for i, ids in enumerate(step):
        context = accelerator.no_sync(model) if i < len(step) - 1 else torch.enable_grad()
        with context:
            logits = model(input_ids=ids, attention_mask=(ids != 0).long()).logits
            loss = criterion(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            total += loss.detach()
            accelerator.backward(
                loss * accelerator.gradient_accumulation_steps * accelerator.num_processes / tokens
            )
    optimizer.step()
    optimizer.zero_grad()
    losses.append((accelerator.reduce(total, "sum") / tokens).item())
    logged.append(accelerator.gather(total[None]).tolist())
print("\nRESULT " + json.dumps([accelerator.process_index, losses, logged]), flush=True)
accelerator.end_training()
