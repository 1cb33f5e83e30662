"""Scripts as people have them, each with one import, argument or call changed, beside themselves: two processes, the same numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parity.user_scripts import ALL, DEEPSPEED_PYTHON, of_deepspeed, on_peer, on_plait

QUICK = frozenset({"fsdp2_gpt"})
"""Run in every `make test`."""


def agree(found, wanted, rtol, where):
    """Nested lists and mappings of numbers and texts."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            agree(found[key], value, rtol, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for index, value in enumerate(wanted):
            agree(found[index], value, rtol, f"{where}[{index}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=rtol, abs=rtol / 10), where
    else:
        assert found == wanted, where


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            script, id=script.name, marks=() if script.name in QUICK else pytest.mark.proof
        )
        for script in ALL
    ],
)
def test_a_script(tmp_path, script):
    if script.peer == "deepspeed" and not DEEPSPEED_PYTHON:
        pytest.skip("PLAIT_DEEPSPEED_PYTHON is not set")
    found, wanted = on_plait(script, tmp_path), on_peer(script, tmp_path)
    for rank, numbers in wanted.items():
        agree(found[rank], numbers, script.rtol, f"rank {rank}")
        losses = numbers[0]
        assert len(losses) >= 4 and len(set(losses)) > 2


COMMON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
}
RATES = {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear"}


@pytest.mark.proof
@pytest.mark.skipif(not DEEPSPEED_PYTHON, reason="PLAIT_DEEPSPEED_PYTHON is not set")
@pytest.mark.parametrize(
    ("name", "stage", "more"),
    [
        ("gpt", 2, {"gradient_accumulation_steps": 2}),
        ("gpt", 3, {"gradient_accumulation_steps": 2}),
        ("cifar", 1, {"scheduler": {"type": "WarmupLR", "params": RATES}}),
    ],
)
def test_curves_of_deepspeed(tmp_path, name, stage, more):
    """Scripts that are given the file of DeepSpeed's launcher have the losses and norms that they have under DeepSpeed itself."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**COMMON, "zero_optimization": {"stage": stage}, **more}))
    given = ("--folder", "checkpoints", "--deepspeed", "--deepspeed_config", str(file))
    script = of_deepspeed(name, *given)
    found = on_plait(script, tmp_path)
    for rank, (losses, norm) in on_peer(script, tmp_path).items():
        assert found[rank][0] == pytest.approx(losses, rel=2e-5) and len(losses) >= 8
        assert found[rank][1] == pytest.approx(norm, rel=1e-4)
