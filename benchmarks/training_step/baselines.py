"""The list of baselines, as data: name, title, who to compare with, and the function that builds its step.

A builder runs inside a worker process whose environment names rank and world, and returns `step(batch) -> (loss, grad_norm)`: one whole
optimizer step on this rank's micro-batch. The norm is global and before clipping, None where a library does not tell it. Nothing heavy is
imported before a builder runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec

from torch import Tensor

from benchmarks.training_step.workload import Workload

Step = Callable[[dict[str, Tensor]], tuple[float, float | None]]
Builder = Callable[[Workload], Step]

HERE = "benchmarks.training_step"


@dataclass(frozen=True)
class Baseline:
    """One way to do the step."""

    name: str
    title: str
    builder: str
    """`module:function` with the signature `(workload, **options) -> Step`, imported in the worker only."""
    options: Mapping[str, object] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    """The ZeRO stages in whose group it takes turns."""
    peer: str | None = None
    """The raw torch baseline with the same ZeRO meaning."""
    rival: str | None = None
    """The DeepSpeed baseline with the same ZeRO meaning."""
    requires: str | None = None
    """A package that the baseline needs and the machine may lack."""
    loss_is_global: bool = False
    """Whether the loss that a step returns is already the mean over ranks."""
    floor: bool = False
    """Whether its ranks train each for itself, which no library can be faster than: its losses are its own."""

    @property
    def missing(self) -> str | None:
        """The required package where it is not installed."""
        return self.requires if self.requires and find_spec(self.requires) is None else None

    def build(self, workload: Workload) -> Step:
        """Import the builder and call it."""
        module, function = self.builder.split(":")
        built: Step = getattr(import_module(module), function)(workload, **self.options)
        return built


REFERENCE = "ddp"
STAGES = (0, 1, 2, 3)
RAW_TORCH = ("ddp", "zero-redundancy", "fsdp-kept", "fsdp-freed")
"""The raw torch baseline of each ZeRO stage."""

ALL = (
    Baseline("ddp", "DDP", f"{HERE}.torch_peers:ddp", stages=STAGES),
    Baseline(
        "ddp-again", "DDP, a second process group (control)", f"{HERE}.torch_peers:ddp", stages=(0,)
    ),
    Baseline(
        "zero-redundancy",
        "DDP + ZeroRedundancyOptimizer",
        f"{HERE}.torch_peers:zero_redundancy",
        stages=(1,),
    ),
    Baseline(
        "fsdp-kept",
        "fully_shard, kept",
        f"{HERE}.torch_peers:fully_sharded",
        {"freed": False},
        stages=(2,),
    ),
    Baseline(
        "fsdp-freed",
        "fully_shard, freed",
        f"{HERE}.torch_peers:fully_sharded",
        {"freed": True},
        stages=(3,),
    ),
    *(
        Baseline(
            f"deepspeed-{stage}",
            f"DeepSpeed ZeRO {stage}",
            f"{HERE}.deepspeed_peer:build",
            {"stage": stage},
            stages=(stage,),
            requires="deepspeed",
        )
        for stage in STAGES
    ),
    *(
        Baseline(
            f"alone-{stage}",
            "Computation alone, no ranks (a floor)",
            f"{HERE}.torch_peers:alone",
            stages=(stage,),
            rival=f"deepspeed-{stage}",
            floor=True,
        )
        for stage in STAGES
    ),
    *(
        Baseline(
            f"plait-{stage}",
            f"Plait ZeRO {stage}",
            f"{HERE}.plait_entry:build",
            {"stage": stage},
            stages=(stage,),
            peer=RAW_TORCH[stage],
            rival=f"deepspeed-{stage}",
            requires="plait",
            loss_is_global=True,
        )
        for stage in STAGES
    ),
)

BY_NAME = {baseline.name: baseline for baseline in ALL}


def of_stage(stage: int, *, names: Collection[str]) -> list[Baseline]:
    """The named baselines that belong to a stage, after the reference, which belongs to all."""
    return [
        one for one in ALL if stage in one.stages and (one.name in names or one.name == REFERENCE)
    ]
