"""The workload of `training_step` with what model parallelism adds: micro-batches, and ranks that share a slice of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from benchmarks.training_step import workload as single


@dataclass(frozen=True)
class Workload(single.Workload):
    """Sizes and hyperparameters of the run. `ranks` and what follows here belong to a layout (`baselines.LAYOUTS`)."""

    micro_batches: int = 8
    """Of a step and slice; `micro_batch` samples each."""
    slices: int = 1
    """Data-parallel slices; consecutive ranks share one."""

    @property
    def tokens_per_step(self) -> int:
        """Target tokens of one optimizer step over all slices."""
        return self.micro_batch * self.micro_batches * (self.sequence - 1) * self.slices

    @property
    def first_stage(self) -> int:
        """Blocks on the first of two pipeline stages: half of them, as both Plait's balance and a hand would cut the default model."""
        return (self.layers + 1) // 2


def batch(workload: Workload, *, step: int, rank: int) -> dict[str, Tensor]:
    """`input_ids` and `labels` [micro_batches x micro_batch, sequence] of one step: alike on the ranks that share a slice."""
    whole = replace(workload, micro_batch=workload.micro_batches * workload.micro_batch)
    return single.batch(whole, step=step, rank=rank * workload.slices // workload.ranks)
