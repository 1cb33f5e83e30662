"""Tensor parallelism of a Llama with torch's parallelize_module and a plan by hand.

Imports no Plait.
"""

import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

dist.init_process_group("gloo")
torch.manual_seed(0)
shape = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model("llama", **shape, num_key_value_heads=2)
)
column = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
column |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
row = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
for layer in model.model.layers:
    parallelize_module(layer, init_device_mesh("cpu", (dist.get_world_size(),)), {**column, **row})
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
draw = torch.Generator().manual_seed(1)
losses = []
for _ in range(6):
    ids = torch.randint(0, 64, (4, 12), generator=draw)  # the same on all ranks
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
last = model.model.layers[1].mlp.down_proj.weight.full_tensor().double().abs().sum().item()
print("\nRESULT " + json.dumps([dist.get_rank(), losses, last]), flush=True)
dist.destroy_process_group()
