"""run_ner, small.

DataCollatorForTokenClassification, labels of -100 on the second piece of a word, entities counted.
Imports no Plait.
"""

import json
import os

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    TrainingArguments,
)
from transformers import Trainer

NAMES = ["O", "B-PER", "I-PER"]


class Padding:
    """A tokenizer that can only pad, as the collator needs it."""

    padding_side = "right"

    def pad(self, features, return_tensors=None, **_):
        rows = {
            key: [torch.tensor(row[key]) for row in features]
            for key in ("input_ids", "attention_mask")
        }
        return {
            key: torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
            for key, values in rows.items()
        }


def rows(count, seed):
    draw = np.random.default_rng(seed)
    examples = []
    for index in range(count):
        tokens = draw.integers(2, 60, 5 + index % 4)
        tags = [int(token > 30) + int(token > 50) for token in tokens]
        labels = [-100 if place % 3 == 2 else tag for place, tag in enumerate(tags)]
        examples.append(
            {
                "input_ids": [int(token) for token in tokens],
                "attention_mask": [1] * len(tokens),
                "labels": labels,
            }
        )
    return examples


def compute_metrics(eval_pred):
    predictions = np.argmax(eval_pred.predictions, axis=-1)
    counted = eval_pred.label_ids != -100
    right = (predictions == eval_pred.label_ids) & counted
    return {
        name: int((right & (eval_pred.label_ids == index)).sum())
        for index, name in enumerate(NAMES)
    } | {"tokens": int(counted.sum())}


torch.manual_seed(0)
shape = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
config = AutoConfig.for_model(
    "bert", **shape, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
args = TrainingArguments(
    output_dir="ner",
    per_device_train_batch_size=4,
    per_device_eval_batch_size=3,
    num_train_epochs=2,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    average_tokens_across_devices=False,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="no",
    logging_steps=1,
    use_cpu=True,
    report_to="none",
)
trainer = Trainer(
    model=AutoModelForTokenClassification.from_config(config),
    args=args,
    data_collator=DataCollatorForTokenClassification(Padding()),
    train_dataset=rows(32, 1),
    eval_dataset=rows(18, 2),
    compute_metrics=compute_metrics,
)
trainer.train()
history = trainer.state.log_history
losses = [row["loss"] for row in history if "loss" in row]
norms = [row["grad_norm"] for row in history if "loss" in row]
evaluations = [
    [row["eval_loss"], row["eval_tokens"], *(row[f"eval_{name}"] for name in NAMES)]
    for row in history
    if "eval_loss" in row
]
print(
    "\nRESULT " + json.dumps([int(os.environ.get("RANK", 0)), losses, norms, evaluations]),
    flush=True,
)
