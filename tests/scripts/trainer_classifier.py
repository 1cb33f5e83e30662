"""run_glue, small.

It has compute_metrics every epoch, load_best_model_at_end, EarlyStoppingCallback and predict.
Imports no Plait.
"""

import json
import os

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    TrainingArguments,
)
from transformers import Trainer


def rows(count, seed):
    ids = torch.randint(2, 50, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [
        {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "label": int(tokens[0] > 25),
        }
        for tokens in ids
    ]


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((np.argmax(logits, axis=-1) == labels).mean()), "count": len(labels)}


torch.manual_seed(0)
shape = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 2,
}
config = AutoConfig.for_model(
    "bert", **shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
)
args = TrainingArguments(
    output_dir="glue",
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    num_train_epochs=3,
    learning_rate=5e-3,
    label_smoothing_factor=0.1,
    logging_steps=1,
    use_cpu=True,
    report_to="none",
)
trainer = Trainer(
    model_init=None,
    model=AutoModelForSequenceClassification.from_config(config),
    args=args,
    train_dataset=rows(32, 1),
    eval_dataset=rows(24, 2),
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
trainer.train()
history = trainer.state.log_history
losses = [row["loss"] for row in history if "loss" in row]
evaluated = [
    [row["eval_loss"], row["eval_accuracy"], row["eval_count"]]
    for row in history
    if "eval_loss" in row
]
predictions, label_ids, metrics = trainer.predict(rows(19, 3))
numbers = [losses, evaluated, predictions.tolist(), metrics["test_accuracy"]]
print("\nRESULT " + json.dumps([int(os.environ.get("RANK", 0)), *numbers]), flush=True)
