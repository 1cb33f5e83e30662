"""DeepSpeed ZeRO through its own engine and JSON configuration, on its CPU accelerator.

It compiles C++ operators when it starts: `prepare` does that once, before any worker runs, with a time limit, because a compilation
that was killed leaves a lock on which every later start waits for ever without a word.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.training_step.baselines import Step
from benchmarks.training_step.workload import Workload, adamw_arguments, build_model

ENVIRONMENT = {"DS_ACCELERATOR": "cpu"}
"""Must be set before deepspeed is imported."""

SHARED_MEMORY = Path("/dev/shm")

_COMPILE = """
from deepspeed.ops.op_builder.cpu import FusedAdamBuilder, ShareMemCommBuilder
for builder in (ShareMemCommBuilder, FusedAdamBuilder):
    builder().load(verbose=False)
"""


def configuration(workload: Workload, *, stage: int) -> dict[str, Any]:
    """The JSON file a user would write. Keys left out have DeepSpeed's defaults."""
    return {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": workload.clip,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": workload.learning_rate,
                "betas": list(workload.betas),
                "eps": workload.eps,
                "weight_decay": workload.weight_decay,
            },
        },
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1_000_000,
    }


def build(
    workload: Workload,
    *,
    stage: int,
    zero: dict[str, Any] | None = None,
    client_optimizer: bool = False,
) -> Step:
    """The engine's three calls."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = build_model(workload)
    config = configuration(workload, stage=stage)
    config["zero_optimization"].update(zero or {})
    optimizer = None
    if client_optimizer:
        import torch

        del config["optimizer"]
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        optimizer = torch.optim.AdamW(model.parameters(), **adamw_arguments(workload))
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, optimizer=optimizer
    )

    def step(batch: dict[str, Tensor]) -> tuple[float, float | None]:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm()  # None at stage 0 in float32
        return loss.item(), None if norm is None else float(norm)

    return step


def prepare(*, timeout_seconds: float = 900) -> str | None:
    """Compile DeepSpeed's CPU operators. Returns why that failed, or None."""
    build = subprocess.Popen(
        [sys.executable, "-c", _COMPILE],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, said = build.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(build.pid, signal.SIGKILL)  # the compilers it started, too
        build.wait()
        folder = os.environ.get("TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions")
        return (
            f"compiling DeepSpeed's operators took more than {timeout_seconds:.0f} s; a build that was killed leaves a file named `lock` "
            f"below {folder}, which blocks every later one: remove it and run again"
        )
    if build.returncode:
        return (
            "DeepSpeed's operators do not compile: "
            + (said.strip().splitlines() or ["no message"])[-1]
        )
    return None


def clean(*, ports: Iterable[int]) -> list[str]:
    """Remove the shared-memory files that DeepSpeed leaves behind. Their names carry the port of the rendezvous, so only files of worker
    groups that met at `ports` are removed. Returns their names."""
    removed = []
    for port in ports:
        for path in SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
