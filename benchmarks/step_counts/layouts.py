"""The layouts, each as a configuration of Plait and as the name of its peer in plain torch."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.steps.plait_entry import configuration
from benchmarks.steps.workload import Workload


@dataclass(frozen=True)
class Layout:
    """How a step is distributed."""

    title: str
    ranks: int
    peer: str
    """Name of the function of `peers` that builds the same in plain torch."""
    stage: int = 0
    parallel: dict[str, Any] = field(default_factory=dict)
    """The section `parallel` of Plait's configuration."""
    accumulation: int = 1
    bf16: bool = False

    @property
    def data_ranks(self) -> int:
        """Number of ranks with different samples."""
        return self.ranks // (self.parallel.get("tp", 1) * self.parallel.get("pp", 1))

    @property
    def workload(self) -> Workload:
        return Workload(
            layers=4,
            hidden=64,
            intermediate=176,
            heads=4,
            sequence=32,
            vocabulary=256,
            micro_batches=self.accumulation,
            ranks=self.ranks,
            ranks_per_slice=self.ranks // self.data_ranks,
        )

    def configuration(self) -> dict[str, Any]:
        """Return the JSON file that a user of Plait would write."""
        # The measurement of links at the start would choose by the load of this machine.
        config = configuration(self.workload, stage=self.stage, measure_seconds=0, **self.parallel)
        if self.bf16:
            config["bf16"] = {"enabled": True}
        return config


LAYOUTS = {
    "zero-0": Layout("ZeRO 0, 2 ranks", 2, "replicated", parallel={"dp_replicate": 2}),
    "zero-1": Layout("ZeRO 1, 2 ranks", 2, "sharded", stage=1, parallel={"dp_shard": 2}),
    "zero-2": Layout("ZeRO 2, 2 ranks", 2, "sharded", stage=2, parallel={"dp_shard": 2}),
    "zero-3": Layout("ZeRO 3, 2 ranks", 2, "sharded", stage=3, parallel={"dp_shard": 2}),
    "zero-3-bf16": Layout(
        "ZeRO 3 in bf16, 2 ranks", 2, "sharded", stage=3, parallel={"dp_shard": 2}, bf16=True
    ),
    "zero-3-accumulation": Layout(
        "ZeRO 3, 4 micro-batches, 2 ranks",
        2,
        "sharded",
        stage=3,
        parallel={"dp_shard": 2},
        accumulation=4,
    ),
    "hybrid": Layout(
        "ZeRO 3 in 2 x 2 ranks", 4, "sharded", stage=3, parallel={"dp_replicate": 2, "dp_shard": 2}
    ),
    "tp": Layout("tp 2", 2, "tensor_parallel", parallel={"tp": 2}),
    "tp-sequence": Layout(
        "tp 2 with sequence parallelism",
        2,
        "tensor_parallel",
        parallel={"tp": 2, "sequence_parallel": True},
    ),
    "pp": Layout("pp 2 (1F1B), 4 micro-batches", 2, "pipeline", parallel={"pp": 2}, accumulation=4),
}
