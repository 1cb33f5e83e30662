"""LoRA with PEFT and the Trainer.

Adapters on a causal language model, saved and opened again. Imports no Plait.
"""

import json
import os

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments
from transformers import Trainer

shape = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def base():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mistral", **shape, num_key_value_heads=2)
    )


model = get_peft_model(
    base(),
    LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type=TaskType.CAUSAL_LM,
    ),
)
model.print_trainable_parameters()
draw = torch.Generator().manual_seed(4)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (32, 10), generator=draw)]
args = TrainingArguments(
    output_dir="lora",
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=0.02,
    logging_steps=1,
    save_strategy="no",
    use_cpu=True,
    report_to=[],
)
trainer = Trainer(model=model, args=args, train_dataset=data)
trainer.train()
trainer.save_model("adapter")
trainer.accelerator.wait_for_everyone()
opened = PeftModel.from_pretrained(base(), "adapter")
with torch.no_grad():
    again = opened(input_ids=torch.arange(10)[None], labels=torch.arange(10)[None]).loss.item()
adapters = sorted(name for name, _ in opened.named_parameters() if "lora_" in name)
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(
    "\nRESULT " + json.dumps([int(os.environ.get("RANK", 0)), losses, again, len(adapters)]),
    flush=True,
)
