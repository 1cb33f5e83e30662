"""Optimizer step with a pipeline and with two-dimensional parallelism: torch and Plait in turns.

python -m benchmarks.pipeline_step [--quick] [--scenes 1f1b]
"""

import sys

from benchmarks.steps.baselines import Baseline, Benchmark, Scene
from benchmarks.steps.command import main

PEERS = "benchmarks.steps.model_parallel_peers"


def _scene(
    name: str, title: str, torch: Baseline, options: dict[str, int], sizes: dict[str, int]
) -> Scene:
    control = Baseline(
        f"{torch.name}-again",
        "the same, a second process group (control)",
        torch.builder,
        loss_is_global=torch.loss_is_global,
    )
    plait = Baseline(
        f"plait-{name}", "Plait", "benchmarks.steps.plait_entry:build", options, loss_is_global=True
    )
    return Scene(name, title, (torch, control, plait), {**sizes, "ranks_per_slice": 2})


BENCHMARK = Benchmark(
    "pipeline_step",
    "Model-parallel step",
    columns=("raw torch",),
    target=1.03,
    scenes=(
        _scene(
            "1f1b",
            "pp 2, 1F1B",
            Baseline(
                "torch-1f1b",
                "torch: Schedule1F1B and PipelineStage",
                f"{PEERS}:one_f_one_b",
                loss_is_global=True,
            ),
            {"pp": 2},
            {"ranks": 2, "micro_batch": 1, "micro_batches": 8},
        ),
        _scene(
            "2d",
            "tp 2 x dp_shard 2, ZeRO 2",
            Baseline(
                "torch-2d", "torch: fully_shard and parallelize_module", f"{PEERS}:two_dimensional"
            ),
            {"tp": 2, "dp_shard": 2, "stage": 2},
            {"ranks": 4, "micro_batch": 2, "micro_batches": 1},
        ),
    ),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
