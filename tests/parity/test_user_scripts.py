"""Users' scripts with one import, argument or call changed have the numbers of the originals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parity.user_scripts import (
    DEEPSPEED_PYTHON,
    SCRIPTS,
    deepspeed_script,
    run_on_plait,
    run_original,
)

pytestmark = pytest.mark.proof  # two launches per script


def assert_close(actual, expected, rtol, path):
    """Compare nested lists and mappings of numbers and texts."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_close(actual[key], value, rtol, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), path
        for index, value in enumerate(expected):
            assert_close(actual[index], value, rtol, f"{path}[{index}]")
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=rtol, abs=rtol / 10), path
    else:
        assert actual == expected, path


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_a_script(tmp_path, script):
    if script.environment == "deepspeed" and not DEEPSPEED_PYTHON:
        pytest.skip("PLAIT_DEEPSPEED_PYTHON is not set")
    actual = run_on_plait(script, tmp_path)
    for rank, expected in run_original(script, tmp_path).items():
        assert_close(actual[rank], expected, script.rtol, f"rank {rank}")
        losses = expected[0]
        assert len(losses) >= 4 and len(set(losses)) > 2


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
}
WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear"}


@pytest.mark.skipif(not DEEPSPEED_PYTHON, reason="PLAIT_DEEPSPEED_PYTHON is not set")
@pytest.mark.parametrize(
    ("name", "stage", "section"),
    [
        ("gpt", 2, {"gradient_accumulation_steps": 2}),
        ("gpt", 3, {"gradient_accumulation_steps": 2}),
        ("cifar", 1, {"scheduler": {"type": "WarmupLR", "params": WARMUP}}),
    ],
)
def test_curves_of_deepspeed(tmp_path, name, stage, section):
    """Losses and norms are those of DeepSpeed itself with the same configuration file."""
    file = tmp_path / "ds.json"
    config = {**CONFIG, "zero_optimization": {"stage": stage}, **section}
    file.write_text(json.dumps(config))
    arguments = ("--folder", "checkpoints", "--deepspeed", "--deepspeed_config", str(file))
    script = deepspeed_script(name, *arguments)
    actual = run_on_plait(script, tmp_path)
    for rank, (losses, norm) in run_original(script, tmp_path).items():
        assert actual[rank][0] == pytest.approx(losses, rel=2e-5) and len(losses) >= 8
        assert actual[rank][1] == pytest.approx(norm, rel=1e-4)
