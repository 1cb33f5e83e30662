"""DPOTrainer of TRL.

Pairs with an explicit prompt, a reference model, a smoothed loss. Imports no Plait.
"""

import json
import os

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

names = ["<pad>", "<eos>", *(f"w{i}" for i in range(40))]
vocabulary = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>"
)


def sentence(i, step):
    return " ".join(f"w{(i * 7 + step * k) % 40}" for k in range(3 + i % 3))


pairs = [
    {"prompt": sentence(i, 1), "chosen": " " + sentence(i, 3), "rejected": " " + sentence(i, 5)}
    for i in range(32)
]
shape = {
    "vocab_size": len(names),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def build_model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen2", **shape, num_key_value_heads=2, pad_token_id=0)
    )


args = DPOConfig(
    output_dir="dpo",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=6,
    learning_rate=5e-3,
    beta=0.3,
    label_smoothing=0.1,
    logging_steps=1,
    bf16=False,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
)
trainer = DPOTrainer(
    model=build_model(),
    ref_model=build_model(),
    args=args,
    train_dataset=Dataset.from_list(pairs),
    processing_class=tokenizer,
)
trainer.train()
rows = [row for row in trainer.state.log_history if "loss" in row]
keys = ("loss", "grad_norm", "rewards/margins", "logps/chosen")
print(
    "\nRESULT "
    + json.dumps([int(os.environ.get("RANK", 0)), *([row[key] for row in rows] for key in keys)]),
    flush=True,
)
