"""Where optimizer states, gradients and master parameters live: on the device, in host memory, or in files (DeepSpeed's
`offload_optimizer`).

Only the settings, what they refuse and what they cost are here. Host memory is an argument of the call that shards (`data`); the optimizer
then runs torch's kernels for CPUs. The files are `arena`, the step over them is `engine.disk_optimizer`.
"""

from __future__ import annotations

from math import prod
from typing import Literal

import numpy as np

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, Problem
from plait.model.facts import ModelFacts, model_facts
from plait.parallel.ledger import Ledger, local_rows
from plait.parallel.technique import Parts, Technique

FIELD = "zero_optimization.offload_optimizer"


class OptimizerOffload(Technique):
    """The tier of the states."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """none: the device. cpu: host memory. nvme: files."""
    pin_memory: bool = True
    """cpu: pin it, so that gradients leave and parameters arrive while the device computes."""
    path: str | None = None
    """nvme: the folder."""
    buffer_bytes: int = 0
    """nvme: what one piece of the step takes, its parameters, gradients and states together."""
    buffer_count: int = 4
    """nvme: pieces in memory at once: those that arrive, one computed, those that leave."""
    ratio: float = 1.0
    """The share of the parameters whose masters, gradients and states are offloaded, in whole units; above 0."""

    def check(self, *, stage: int, device_type: str) -> None:
        """Raise ConfigError for what this version does not do. Needs no process group."""
        if self.device == "none":
            return
        if stage == 0:
            rule = "ZeRO stage 0 keeps whole optimizer states on every process"
            raise ConfigError(Problem(f"{FIELD}.device", self.device, rule, "set zero_optimization.stage to 1, 2 or 3"))
        if self.device == "cpu" and device_type == "cpu":
            rule = "the device is the CPU, whose memory is the host's: nothing would move"
            raise ConfigError(Problem(f"{FIELD}.device", self.device, rule, 'use "none", or "nvme" with a nvme_path'))
        if self.device == "nvme" and device_type != "cpu":
            rule = "files are mapped into host memory, and copies to and from a GPU are not written yet"
            raise ConfigError(Problem(f"{FIELD}.device", self.device, rule, 'use "cpu" or "none"'))

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Leave for the technique that shards what it is to ask of torch. Files come later: the engine moves what is sharded by then."""
        if self.device == "none":
            return parts
        on_host = self.device == "cpu"
        pinned = on_host and self.pin_memory and mesh.device.type == "cuda"
        where = "host" if on_host else self.path
        chosen = offloaded_units(model_facts(parts.model, parts.blocks), self.ratio)
        units = frozenset(parts.blocks[unit] if unit >= 0 else "" for unit in chosen)
        return parts.with_(
            masters_on_host=on_host, pin_masters=pinned, offloaded_units=units, applied=(*parts.applied, f"optimizer offload({where})")
        )

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Of the states that others priced, what is on the host or in files; and the pieces that are in memory during the step."""
        if self.device == "none":
            return ledger
        chosen = offloaded_units(facts, self.ratio)
        sharded = (ledger.dp_shard > 1) | (ledger.compute_bytes is not None) | (self.device == "cpu")
        moved = np.zeros_like(ledger.dp_shard)
        for parameter in facts.parameters:
            if parameter.unit not in chosen:
                continue
            rows, row = local_rows(parameter.shape, ledger.tensor_dims.get(parameter.name), ledger)
            chunk = -(-rows // ledger.dp_shard)  # shards are stored padded to the first rank's
            held = np.where(sharded, np.minimum(chunk, np.maximum(rows - ledger.shard_rank * chunk, 0)), rows)
            padded = chunk * row * parameter.itemsize
            moved = moved + np.where(sharded, padded, 0)  # what is computed with as it is stays in memory
            if parameter.trainable:
                states = held * row * parameter.itemsize * ledger.optimizer_tensors
                on_host = self.device == "cpu"  # padded gradients, and step counts, which files do not hold
                moved = moved + states + (padded + ledger.optimizer_scalar_bytes if on_host else held * row * parameter.itemsize)
        if self.device == "cpu":
            return ledger.add_memory("host", moved)
        return ledger.add_memory("files", moved).add_memory("step_buffers", np.minimum(moved, self.buffer_bytes * self.buffer_count))


def offloaded_units(facts: ModelFacts, ratio: float) -> frozenset[int]:
    """Blocks from the first on, then what is outside of them (-1), until their share of the parameters is at least `ratio`. By whole
    shapes, so that every rank of a stage chooses the same."""
    sizes: dict[int, int] = {}
    for parameter in facts.parameters:
        sizes[parameter.unit] = sizes.get(parameter.unit, 0) + prod(parameter.shape) * parameter.itemsize
    chosen: set[int] = set()
    total = sum(sizes.values())
    for unit in sorted(sizes, key=lambda unit: (unit < 0, unit)):
        if sum(sizes[other] for other in chosen) < ratio * total:
            chosen.add(unit)
    return frozenset(chosen)
