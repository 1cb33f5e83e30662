"""Whether `plait verify` notices a mutant that no test does: a cover of layouts, each on a tiny Llama."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.mutants.catalogue import ROOT, Mutant
from tools.mutants.runner import Copy

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 301,
}
COMMON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "model": {"config": LLAMA},
}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"zero_optimization": {"stage": 0}, "parallel": {"dp_shard": 1, "dp_replicate": 2}},
    {"zero_optimization": {"stage": 1}, "parallel": {"dp_shard": 2, "tp": 2}},
    {"zero_optimization": {"stage": 2}, "parallel": {"dp_shard": 2, "pp": 2}},
    {
        "zero_optimization": {"stage": 3},
        "parallel": {"dp_shard": 2, "tp": 2, "sequence_parallel": True},
    },
)
DIFFERENT = 3
"""The exit code of `plait verify` where a layout computes something else."""


def notices(mutant: Mutant, copy: Copy) -> bool:
    """Whether the command ends with `DIFFERENT` for one of the layouts."""
    copy.make()
    copy.write(mutant.file, mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8")))
    env = {**os.environ, "PYTHONPATH": str(copy.folder / "src"), "OMP_NUM_THREADS": "1"}
    for index, layout in enumerate(LAYOUTS):
        file = Path(copy.folder / f"verify-{index}.json")
        file.write_text(json.dumps({**COMMON, **layout}), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "plait", "verify", str(file)],
            cwd=copy.folder,
            env=env,
            capture_output=True,
            timeout=600,
        )
        if done.returncode == DIFFERENT:
            return True
    return False
