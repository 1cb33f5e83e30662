"""Accelerate's nlp_example, small.

Padded batches, a schedule, metrics of 21 samples on two ranks. Imports no Plait.
"""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    get_linear_schedule_with_warmup,
)


def rows(count, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randint(2, 50, (4 + i % 5,), generator=draw) for i in range(count)]
    return [{"input_ids": tokens, "labels": int(tokens.sum()) % 2} for tokens in ids]


def collate(examples):
    ids = torch.nn.utils.rnn.pad_sequence([e["input_ids"] for e in examples], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([e["labels"] for e in examples]),
    }


def training_function():
    accelerator = Accelerator()
    set_seed(42)
    train_dataloader = DataLoader(rows(32, 1), shuffle=True, collate_fn=collate, batch_size=4)
    eval_dataloader = DataLoader(rows(21, 2), shuffle=False, collate_fn=collate, batch_size=4)
    shape = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = AutoConfig.for_model(
        "bert", **shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model = AutoModelForSequenceClassification.from_config(config)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-3)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=2, num_training_steps=len(train_dataloader) * 3
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    losses = []
    counts = []
    hits = []
    for _ in range(3):
        model.train()
        for batch in train_dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        seen = right = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics(
                (outputs.logits.argmax(dim=-1), batch["labels"])
            )
            seen = seen + len(references)
            right = right + (predictions == references).sum().item()
        counts.append(seen)
        hits.append(right)
    rates = lr_scheduler.get_last_lr()
    print(
        "\nRESULT " + json.dumps([accelerator.process_index, losses, counts, hits, rates]),
        flush=True,
    )
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
