"""Make tests/unit/checkpoint/deepspeed: checkpoints of DeepSpeed 0.19.8, ZeRO 1 to 3 on two ranks.

    pip install torch==2.13.0 deepspeed==0.19.8
    DS_ACCELERATOR=cpu python tools/deepspeed_fixtures.py

The command needs an environment of its own, because the project does not need DeepSpeed. The model
has a parameter that lies on both ranks, a frozen one, a buffer and two parameter groups.
`test_import.py` trains it in plain torch and compares.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
import torch.multiprocessing as mp

OUT = Path(__file__).parents[1] / "tests/unit/checkpoint/deepspeed"


class Model(torch.nn.Module):
    """A model with a frozen weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.frozen = torch.nn.Linear(7, 7, bias=False)
        self.last = torch.nn.Linear(7, 3, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("mean", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.frozen(self.first(x).relu())) - self.mean).square().mean()


def work(rank: int, stage: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import deepspeed

    torch.manual_seed(0)
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    model = Model()
    rows = torch.randn(4, 5)
    groups = [
        {"params": [model.first.weight, model.last.weight], "weight_decay": 0.1},
        {"params": [model.first.bias], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(3):
        engine.backward(engine(rows[2 * rank : 2 * rank + 2]))
        engine.step()
    client_state = {"epoch": 2, "name": "x"}
    engine.save_checkpoint(OUT / f"zero{stage}", tag="step3", client_state=client_state)


if __name__ == "__main__":
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    for stage in (1, 2, 3):
        mp.spawn(work, (stage, 29710 + stage), nprocs=2)
        for path in OUT.rglob("*.py"):  # a copy of DeepSpeed's own script
            path.unlink()
    for path in sorted(OUT.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:8} {path}")
