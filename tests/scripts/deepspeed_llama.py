"""A model of Transformers under DeepSpeed stage 3, evaluation between steps and saved weights.

Imports no Plait.
"""

import json
import os

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

config = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "stage3_gather_16bit_weights_on_model_save": True,
        "sub_group_size": 1e9,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0, "torch_adam": True}},
    "wall_clock_breakdown": False,
}
shape = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model("llama", **shape, num_key_value_heads=2)
)
model_engine, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
draw = torch.Generator().manual_seed(9)
losses = []
evaluated = []
for _ in range(8):
    model_engine.train()
    ids = torch.randint(0, 64, (2, 2, 12), generator=draw)[model_engine.global_rank].to(
        model_engine.device
    )
    loss = model_engine(input_ids=ids, labels=ids).loss
    model_engine.backward(loss)
    model_engine.step()
    losses.append(loss.item())
    if model_engine.is_gradient_accumulation_boundary():
        model_engine.eval()
        with torch.no_grad():
            held_out = torch.arange(12)[None].to(model_engine.device)
            evaluated.append(model_engine(input_ids=held_out, labels=held_out).loss.item())
model_engine.save_16bit_model("weights", "model.bin")
torch.distributed.barrier()
saved = torch.load(os.path.join("weights", "model.bin"))
total = sum(tensor.double().abs().sum().item() for tensor in saved.values())
print(
    "\nRESULT " + json.dumps([model_engine.global_rank, losses, evaluated, sorted(saved), total]),
    flush=True,
)
