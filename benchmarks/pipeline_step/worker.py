"""What runs inside a worker process: `training_step`'s runner, with this benchmark's batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.pipeline_step.workload import Workload, batch
from benchmarks.training_step.baselines import Baseline
from benchmarks.training_step.worker import Runner, answers


class LayoutRunner(Runner):
    """Ranks that share a slice see the same batch."""

    roots = ("LlamaForCausalLM", "LlamaStage")

    def batch(self, step: int) -> dict[str, Tensor]:
        """What this rank's step number `step` sees."""
        assert isinstance(self.workload, Workload)
        return batch(self.workload, step=step, rank=self.rank)


def start(argument: tuple[Baseline, Workload]) -> Callable[[tuple[str, dict[str, Any]]], Any]:
    """Build the baseline and return what answers messages."""
    baseline, workload = argument
    torch.set_num_threads(workload.threads)
    return answers(LayoutRunner(baseline.build(workload), workload))
