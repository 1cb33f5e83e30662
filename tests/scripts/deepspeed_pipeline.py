"""DeepSpeed's pipeline example.

LayerSpec, PipelineModule, train_batch, eval_batch. Imports no Plait.
"""

import json

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


class Seeded(nn.Linear):
    """A linear layer with the same weights on every stage that builds it."""

    def __init__(self, fan_in, fan_out, seed):
        super().__init__(fan_in, fan_out)
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.3, 0.3, generator=draw)


class Residual(nn.Module):
    def __init__(self, width, seed):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = Seeded(width, width, seed)

    def forward(self, x):
        return x + torch.relu(self.inner(self.norm(x)))


def batches(seed):
    draw = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(2, 12, generator=draw)
        yield x, x[:, :5].argmax(1)


deepspeed.init_distributed(dist_backend="gloo")
LayerSpec = deepspeed.pipe.LayerSpec
layers = [
    LayerSpec(Seeded, 12, 16, 1),
    *(LayerSpec(Residual, 16, seed) for seed in (2, 3, 4)),
    LayerSpec(Seeded, 16, 5, 5),
]
net = deepspeed.pipe.PipelineModule(
    layers=layers, num_stages=2, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform"
)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 0.01,
            "warmup_num_steps": 3,
            "warmup_type": "linear",
        },
    },
    "steps_per_print": 1000,
}
engine, _, _, _ = deepspeed.initialize(
    model=net, model_parameters=list(net.parameters()), config=config
)
train = batches(1)
held_out = batches(2)
losses = [engine.train_batch(data_iter=train).item() for _ in range(6)]
evaluated = engine.eval_batch(data_iter=held_out).item()
print("\nRESULT " + json.dumps([dist.get_rank(), losses, evaluated, engine.get_lr()]), flush=True)
