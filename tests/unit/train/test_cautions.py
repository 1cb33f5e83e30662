"""What `plait train` warns of before the first step (E7)."""

from __future__ import annotations

from typing import Any

import pytest

from plait.config.resolving.resolve import load, resolve
from plait.train.session import cautions

FILE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "run": {"steps": 4},
}


@pytest.mark.parametrize(
    ("scheduler", "warned"),
    [
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 100}}, True),
        ({"type": "linear", "params": {"num_warmup_steps": 4}}, True),
        ({"type": "linear", "params": {"num_warmup_steps": 3}}, False),
        ({"type": "constant"}, False),
        (None, False),
    ],
)
def test_a_warm_up_longer_than_the_run(scheduler: dict[str, Any] | None, warned: bool) -> None:
    tree = FILE if scheduler is None else FILE | {"scheduler": scheduler}
    found = cautions(
        resolve(load(tree), world_size=1, total_steps=4), processes=1, cores=2, on_gpus=False
    )
    assert any("warms up" in line and "the run has 4" in line for line in found) == warned


@pytest.mark.parametrize(
    ("processes", "on_gpus", "warned"), [(64, False, True), (4, False, False), (64, True, False)]
)
def test_many_processes_on_few_cores(processes: int, on_gpus: bool, warned: bool) -> None:
    found = cautions(
        resolve(load(FILE), world_size=processes), processes=processes, cores=2, on_gpus=on_gpus
    )
    assert any("share 2 cores" in line for line in found) == warned
