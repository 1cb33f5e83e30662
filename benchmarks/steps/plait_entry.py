"""Plait as a user writes it: `plait.initialize` with a configuration, then `train_batch`."""

from typing import Any

from torch import Tensor

from benchmarks.steps import workload as work
from benchmarks.steps.baselines import Step
from benchmarks.steps.workload import Workload, build_model


def configuration(workload: Workload, *, stage: int = 0, **parallel: Any) -> dict[str, Any]:
    """Return the configuration with this section `parallel`. Pipelines have two stages."""
    if parallel.get("pp", 1) > 1:
        blocks = [workload.first_stage, workload.layers - workload.first_stage]
        parallel["pipeline"] = {"schedule": "1f1b", "blocks_per_stage": blocks}
    return work.configuration(workload, stage=stage) | {"parallel": parallel}


def build(
    workload: Workload, *, communication_data_type: str | None = None, **options: Any
) -> Step:
    """Return one `train_batch`. It prints what the engine decides about its communication."""
    import plait

    config = configuration(workload, **options)
    if communication_data_type is not None:
        config["communication_data_type"] = communication_data_type
    engine = plait.initialize(build_model(workload), config, loss_fn=plait.causal_lm_loss)
    print(engine.communication, flush=True)

    def step(batch: dict[str, Tensor]) -> tuple[float, float]:
        result = engine.train_batch(batch)
        if result.decided:
            print(result.decided, flush=True)
        return float(result.loss), float(result.grad_norm)

    return step
