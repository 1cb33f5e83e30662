"""A reward model.

One score for each answer, the better of a pair above the worse, both through one forward. DDP.
Imports no Plait.
"""

import json
import os

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoConfig, AutoModelForSequenceClassification


class Pairs(Dataset):
    """(better, worse) of different lengths."""

    def __init__(self, count):
        draw = torch.Generator().manual_seed(2)
        self.rows = []
        for index in range(count):
            better, worse = (
                torch.randint(1, 60, (length,), generator=draw)
                for length in (6 + index % 3, 5 + index % 4)
            )
            self.rows.append(
                (better, worse) if better.float().mean() > worse.float().mean() else (worse, better)
            )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(pairs):
    ids = [better for better, _ in pairs] + [worse for _, worse in pairs]
    ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


rank = int(os.environ["RANK"])
world = int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world)
torch.manual_seed(0)
shape = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
config = AutoConfig.for_model("llama", **shape, num_key_value_heads=2, num_labels=1, pad_token_id=0)
model = DDP(AutoModelForSequenceClassification.from_config(config))
decayed = [p for name, p in model.named_parameters() if p.ndim > 1]
others = [p for name, p in model.named_parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=5e-3
)
data = Pairs(24)
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=3, sampler=sampler, collate_fn=collate)
losses = []
margins = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        better, worse = model(**batch).logits.squeeze(-1).chunk(2)
        loss = -F.logsigmoid(better - worse).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        margins.append((better - worse).mean().item())
model.eval()
with torch.no_grad():
    scores = model(**collate([data[0], data[1]])).logits.flatten().tolist()
print("\nRESULT " + json.dumps([rank, losses, margins, scores]), flush=True)
dist.destroy_process_group()
