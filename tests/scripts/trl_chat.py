"""SFTTrainer of TRL on conversations.

A chat template, peft_config=, the loss of completions alone. Imports no Plait.
"""

import json
import os

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

names = ["<pad>", "<eos>", "<user>", "<assistant>", *(f"w{i}" for i in range(40))]
vocabulary = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<eos>"
)
begin = "{% if add_generation_prompt %}<assistant> {% endif %}"
tokenizer.chat_template = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}" + begin
)


def talk(i):
    tokens = [f"w{(i * k + 3 * k) % 40}" for k in range(1, 6)]
    prompt = {"role": "user", "content": " ".join(tokens)}
    completion = {"role": "assistant", "content": " ".join(tokens[::-1]) + " <eos>"}
    return {"prompt": [prompt], "completion": [completion]}


torch.manual_seed(0)
shape = {
    "vocab_size": len(names),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model("llama", **shape, num_key_value_heads=2, pad_token_id=0)
)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="sft",
        per_device_train_batch_size=2,
        max_steps=8,
        learning_rate=0.02,
        logging_steps=1,
        completion_only_loss=True,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    ),
    train_dataset=Dataset.from_list([talk(i) for i in range(32)]),
    processing_class=tokenizer,
    peft_config=LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"
    ),
)
trainer.train()
rows = [row for row in trainer.state.log_history if "loss" in row]
numbers = [[row[key] for row in rows] for key in ("loss", "grad_norm", "num_tokens")]
print("\nRESULT " + json.dumps([int(os.environ.get("RANK", 0)), *numbers]), flush=True)
