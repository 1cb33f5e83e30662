"""Scripts in DeepSpeed's style, under DeepSpeed itself and, with one import changed, under Plait: the same losses and norms.

DeepSpeed is in an environment of its own, whose Python PLAIT_DEEPSPEED_PYTHON names; the test is skipped without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PEER = os.environ.get("PLAIT_DEEPSPEED_PYTHON", "")
SCRIPTS = Path(__file__).parents[1] / "scripts"
COMMON: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
RATES = {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear"}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not PEER, reason="PLAIT_DEEPSPEED_PYTHON is not set"),
]


def run(
    command: list[str], script: Path, folder: Path, **environment: str
) -> dict[int, tuple[list[float], float]]:
    """(losses, norm) of every rank."""
    arguments = [
        "--folder",
        str(folder / "checkpoints"),
        "--deepspeed",
        "--deepspeed_config",
        str(folder / "ds.json"),
    ]
    done = subprocess.run(
        [*command, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [
        json.loads(line.split("RESULT ", 1)[1])
        for line in done.stdout.splitlines()
        if "RESULT " in line
    ]
    assert len(found) == 2, done.stdout[-2000:]
    return {rank: (losses, norm) for rank, losses, norm in found}


@pytest.mark.parametrize(
    ("script", "stage", "more"),
    [
        ("deepspeed_gpt", 2, {"gradient_accumulation_steps": 2}),
        ("deepspeed_gpt", 3, {"gradient_accumulation_steps": 2}),
        ("deepspeed_cifar", 1, {"scheduler": {"type": "WarmupLR", "params": RATES}}),
    ],
)
def test_the_curves_agree(tmp_path: Path, script: str, stage: int, more: dict[str, Any]) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {**COMMON, "optimizer": OPTIMIZER, "zero_optimization": {"stage": stage}, **more}
        )
    )
    theirs, ours = SCRIPTS / f"{script}.py", tmp_path / f"{script}.py"
    text = theirs.read_text(encoding="utf-8")
    assert text.count("import deepspeed\n") == 1
    ours.write_text(
        text.replace("import deepspeed\n", "import plait.compat.deepspeed as deepspeed\n")
    )
    path = f"{Path(PEER).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed looks for ninja
    torchrun = [
        PEER,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "29617",
    ]
    wanted = run(torchrun, theirs, tmp_path, PATH=path, DS_ACCELERATOR="cpu", PYTHONPATH="")
    if (tmp_path / "checkpoints").exists():
        (tmp_path / "checkpoints").rename(tmp_path / "theirs")
    found = run([sys.executable, "-m", "plait", "launch", "--nproc-per-node", "2"], ours, tmp_path)
    for rank, (losses, norm) in wanted.items():
        assert found[rank][0] == pytest.approx(losses, rel=2e-5) and len(losses) >= 8
        assert found[rank][1] == pytest.approx(norm, rel=1e-4)
