"""LoRA in an Accelerate loop.

PEFT's adapters, gather of losses, adapters that are saved by the first process. Imports no Plait.
"""

import json

import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

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
        AutoConfig.for_model("qwen2", **shape, num_key_value_heads=2)
    )


def main():
    accelerator = Accelerator()
    peft_config = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    model = get_peft_model(base(), peft_config)
    torch.manual_seed(1)
    train = DataLoader(TensorDataset(torch.randint(0, 64, (32, 10))), batch_size=4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    losses = []
    means = []
    for _ in range(2):
        model.train()
        for (ids,) in train:
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            means.append(accelerator.gather(loss.detach()).mean().item())
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("adapter", state_dict=weights)
    accelerator.wait_for_everyone()
    ids = torch.arange(10)[None]
    opened = PeftModel.from_pretrained(base(), "adapter")
    with torch.no_grad():
        again = opened(input_ids=ids, labels=ids).loss.item()
    accelerator.print("adapters saved")
    print("\nRESULT " + json.dumps([accelerator.process_index, losses, means, again]), flush=True)


if __name__ == "__main__":
    main()
