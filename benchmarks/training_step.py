"""Optimizer step at ZeRO 0 to 3: DDP, `fully_shard`, DeepSpeed and Plait in turns.

python -m benchmarks.training_step [--quick] [--scenes stage_0] [--baselines ddp plait-0]
"""

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.steps.baselines import Baseline, Benchmark, Scene
from benchmarks.steps.command import main

PEERS = "benchmarks.steps.torch_peers"
DDP = Baseline("ddp", "DDP", f"{PEERS}:ddp")


def _torch(name: str, title: str, function: str, options: Mapping[str, Any]) -> Baseline:
    return Baseline(name, title, f"{PEERS}:{function}", options)


RAW_TORCH = (
    _torch("ddp-again", "DDP, a second process group (control)", "ddp", {}),
    _torch("zero-redundancy", "DDP + ZeroRedundancyOptimizer", "zero_redundancy", {}),
    _torch("fsdp-kept", "fully_shard, kept", "fully_sharded", {"freed": False}),
    _torch("fsdp-freed", "fully_shard, freed", "fully_sharded", {"freed": True}),
)
"""Peer of each ZeRO stage besides DDP."""


def _scene(stage: int) -> Scene:
    deepspeed = Baseline(
        f"deepspeed-{stage}",
        f"DeepSpeed ZeRO {stage}",
        "benchmarks.steps.deepspeed_peer:build",
        {"stage": stage},
        requires="deepspeed",
    )
    alone = Baseline(
        f"alone-{stage}",
        "Computation alone, no ranks (a floor)",
        f"{PEERS}:alone",
        against={"DeepSpeed": deepspeed.name},
        floor=True,
    )
    peer = RAW_TORCH[stage] if stage else DDP
    plait = Baseline(
        f"plait-{stage}",
        f"Plait ZeRO {stage}",
        "benchmarks.steps.plait_entry:build",
        {"stage": stage},
        against={"raw torch": peer.name, "DeepSpeed": deepspeed.name},
        loss_is_global=True,
    )
    baselines = (DDP, RAW_TORCH[stage], deepspeed, alone, plait)
    return Scene(f"stage_{stage}", f"Stage {stage}", baselines)


BENCHMARK = Benchmark(
    "training_step",
    "Training step",
    columns=("DDP", "raw torch", "DeepSpeed"),
    scenes=tuple(_scene(stage) for stage in range(4)),
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
