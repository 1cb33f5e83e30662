"""zero.Init and GatheredParameters at stage 3.

A model that is never whole, weights set and read in between. Imports no Plait.
"""

import json

import deepspeed
import torch
from torch import nn

config = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "contiguous_gradients": False,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "gradient_clipping": 0.5,
    "zero_allow_untested_optimizer": True,
}


class Seeded(nn.Linear):
    def reset_parameters(self):
        draw = torch.Generator().manual_seed(self.out_features)
        with torch.no_grad():
            self.weight.uniform_(-0.5, 0.5, generator=draw)
            self.bias.zero_()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Seeded(10, 10) for _ in range(3))
        self.out = Seeded(10, 2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


deepspeed.init_distributed("gloo")
with deepspeed.zero.Init(config_dict_or_path=config):
    net = Net()
engine, optimizer, _, _ = deepspeed.initialize(
    model=net, model_parameters=net.parameters(), config=config
)
draw = torch.Generator().manual_seed(1)
losses = []
for _ in range(8):
    x = torch.randn(2, 4, 10, generator=draw)[engine.global_rank].to(engine.device)
    loss = nn.functional.mse_loss(engine(x), x[:, :2])
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
with deepspeed.zero.GatheredParameters(list(engine.module.out.parameters())):
    weight = engine.module.out.weight.detach().flatten().tolist()
states = [
    deepspeed.utils.safe_get_full_optimizer_state(engine.module.out.weight, key)
    for key in ("exp_avg", "exp_avg_sq")
]
moments = [state.flatten().tolist() for state in states]
print(
    "\nRESULT "
    + json.dumps(
        [engine.global_rank, losses, weight, moments, float(engine.get_global_grad_norm())]
    ),
    flush=True,
)
