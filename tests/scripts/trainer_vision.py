"""An image classifier of Transformers.

A ViT, pixel_values, gradient checkpointing, a checkpoint that is opened. Imports no Plait.
"""

import json
import os

import torch
from transformers import AutoConfig, AutoModelForImageClassification, TrainingArguments
from transformers import Trainer


class Images(torch.utils.data.Dataset):
    def __init__(self, count):
        self.pixels = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "labels": index % 4}


torch.manual_seed(0)
shape = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 8,
}
config = AutoConfig.for_model(
    "vit",
    **shape,
    image_size=16,
    num_labels=4,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
args = TrainingArguments(
    output_dir="vit",
    per_device_train_batch_size=4,
    learning_rate=2e-3,
    max_steps=8,
    gradient_checkpointing=True,
    logging_steps=1,
    save_steps=4,
    use_cpu=True,
    report_to="none",
)
trainer = Trainer(
    model=AutoModelForImageClassification.from_config(config), args=args, train_dataset=Images(32)
)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
opened = AutoModelForImageClassification.from_pretrained(os.path.join("vit", "checkpoint-8"))
with torch.no_grad():
    again = opened(pixel_values=Images(4).pixels).logits.flatten().tolist()
print("\nRESULT " + json.dumps([int(os.environ.get("RANK", 0)), losses, again]), flush=True)
