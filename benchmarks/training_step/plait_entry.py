"""Plait as a user writes it: `plait.initialize` with a DeepSpeed-style configuration, then `train_batch`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.training_step.baselines import Step
from benchmarks.training_step.workload import Workload, build_model


def configuration(workload: Workload, *, stage: int) -> dict[str, Any]:
    """The JSON file a user would write. Keys left out have their defaults."""
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
    }


def build(workload: Workload, *, stage: int) -> Step:
    """One `train_batch` a step; its loss is already the mean over all ranks."""
    import plait

    engine = plait.initialize(
        build_model(workload), configuration(workload, stage=stage), loss_fn=plait.causal_lm_loss
    )

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        result = engine.train_batch(batch)
        return float(result.loss), float(result.grad_norm)

    return step
