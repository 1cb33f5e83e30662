"""A subclass of the Trainer.

A weighted loss, a callback, a collator, an optimizer and a schedule that are passed.
Imports no Plait.
"""

import json
import os

import torch
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    TrainerCallback,
    TrainingArguments,
)
from transformers import Trainer


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 3.0, 0.5], device=labels.device)
        loss = torch.nn.functional.cross_entropy(
            outputs.logits.flatten(0, 1), labels.flatten(), weight=weight
        )
        return (loss, outputs) if return_outputs else loss


class Remember(TrainerCallback):
    def __init__(self):
        self.rates = []
        self.epochs = 0

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_epoch_end(self, args, state, control, **kwargs):
        self.epochs += 1


def collate(rows):
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids % 3}


torch.manual_seed(0)
shape = {
    "vocab_size": 50,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
model = AutoModelForTokenClassification.from_config(
    AutoConfig.for_model("distilbert", **shape, num_labels=3)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
remember = Remember()
data = list(torch.randint(0, 50, (24, 8)))
args = TrainingArguments(
    "out",
    per_device_train_batch_size=3,
    num_train_epochs=2,
    max_grad_norm=0.7,
    remove_unused_columns=False,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    report_to="none",
)
trainer = WeightedTrainer(
    model, args, collate, data, optimizers=(optimizer, schedule), callbacks=[remember]
)
trainer.train()
rows = [row for row in trainer.state.log_history if "loss" in row]
numbers = [
    [row["loss"] for row in rows],
    [row["grad_norm"] for row in rows],
    remember.rates,
    remember.epochs,
]
print("\nRESULT " + json.dumps([int(os.environ.get("RANK", 0)), *numbers]), flush=True)
