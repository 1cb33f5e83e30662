"""Plait as a user writes it: the model as it is, a configuration, `train_batch`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.pipeline_step.workload import Workload
from benchmarks.training_step import plait_entry
from benchmarks.training_step.baselines import Step
from benchmarks.training_step.workload import build_model


def configuration(
    workload: Workload, *, stage: int = 0, pp: int = 1, tp: int = 1, dp_shard: int = 1
) -> dict[str, Any]:
    """The JSON file a user would write. The stages are told, so that both baselines have the same."""
    parallel: dict[str, Any] = {"pp": pp, "tp": tp, "dp_shard": dp_shard}
    if pp > 1:
        parallel["pipeline"] = {
            "schedule": "1f1b",
            "blocks_per_stage": [workload.first_stage, workload.layers - workload.first_stage],
        }
    return {
        **plait_entry.configuration(workload, stage=stage),
        "gradient_accumulation_steps": workload.micro_batches,
        "parallel": parallel,
    }


def build(workload: Workload, **degrees: int) -> Step:
    """One `train_batch` a step; its loss is already the mean over all ranks."""
    import plait

    engine = plait.initialize(
        build_model(workload), configuration(workload, **degrees), loss_fn=plait.causal_lm_loss
    )

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        result = engine.train_batch(batch)
        return float(result.loss), float(result.grad_norm)

    return step
