"""run_translation, small.

A T5, DataCollatorForSeq2Seq's padding by hand, predict_with_generate. Imports no Plait.
"""

import json
import os

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, Seq2SeqTrainingArguments
from transformers import Seq2SeqTrainer


def rows(count, seed):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 40, (4 + i % 4,), generator=draw) for i in range(count)]


def collate(batch):
    def pad(ids, value):
        return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=value)

    ids = pad(batch, 0)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": pad([tokens.flip(0) for tokens in batch], -100),
    }


torch.manual_seed(0)
shape = {
    "vocab_size": 40,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
model = AutoModelForSeq2SeqLM.from_config(
    AutoConfig.for_model("t5", **shape, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
)
args = Seq2SeqTrainingArguments(
    output_dir="t5",
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    max_steps=10,
    learning_rate=0.01,
    predict_with_generate=True,
    generation_max_length=7,
    logging_steps=1,
    save_strategy="no",
    remove_unused_columns=False,
    use_cpu=True,
    report_to="none",
)
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    data_collator=collate,
    train_dataset=rows(40, 1),
    eval_dataset=rows(16, 2),
    compute_metrics=lambda p: {"seen": len(p.predictions)},
)
trainer.train()
metrics = trainer.evaluate()
tokens = trainer.predict(rows(8, 3)).predictions.tolist()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(
    "\nRESULT "
    + json.dumps(
        [int(os.environ.get("RANK", 0)), losses, metrics["eval_loss"], metrics["eval_seen"], tokens]
    ),
    flush=True,
)
