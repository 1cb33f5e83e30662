"""An iterable data set with max_steps.

It has a schedule by name, and a callback that writes a file of numbers. Imports no Plait.
"""

import json
import os

import torch
from transformers import AutoConfig, AutoModelForMaskedLM, TrainingArguments
from transformers import Trainer


class Stream(torch.utils.data.IterableDataset):
    """Masks by a rule, so that every run sees the same."""

    def __iter__(self):
        draw = torch.Generator().manual_seed(0)
        for index in range(1000):
            ids = torch.randint(3, 50, (10,), generator=draw)
            masked = (torch.arange(10) + index) % 5 == 0
            yield {
                "input_ids": ids.masked_fill(masked, 1),
                "labels": ids.masked_fill(~masked, -100),
            }


torch.manual_seed(0)
shape = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
config = AutoConfig.for_model(
    "roberta", **shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0
)
args = TrainingArguments(
    output_dir="stream",
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=5e-3,
    lr_scheduler_type="constant_with_warmup",
    warmup_steps=3,
    adam_beta2=0.95,
    logging_strategy="steps",
    logging_steps=2,
    save_strategy="no",
    accelerator_config={"dispatch_batches": None},
    use_cpu=True,
    report_to="none",
)
trainer = Trainer(model=AutoModelForMaskedLM.from_config(config), args=args, train_dataset=Stream())
result = trainer.train()
rows = [row for row in trainer.state.log_history if "loss" in row]
numbers = [[row[key] for row in rows] for key in ("loss", "grad_norm", "learning_rate")]
print(
    "\nRESULT " + json.dumps([int(os.environ.get("RANK", 0)), *numbers, result.training_loss]),
    flush=True,
)
