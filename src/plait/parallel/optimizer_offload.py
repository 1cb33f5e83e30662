"""Where optimizer states, gradients and master parameters live: in memory, or in files (DeepSpeed's `offload_optimizer`).

Only the settings, what they refuse and what they cost are here. The files are `arena`, the step over them is `engine.disk_optimizer`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.ledger import Ledger
from plait.parallel.technique import Parts, Technique

FIELD = "zero_optimization.offload_optimizer"


class OptimizerOffload(Technique):
    """The tier of the states."""

    device: Literal["none", "nvme"] = "none"
    """none: memory. nvme: files."""
    path: str | None = None
    """nvme: the folder."""
    buffer_bytes: int = 0
    """nvme: what one piece of the step takes, its parameters, gradients and states together."""
    buffer_count: int = 4
    """nvme: pieces in memory at once: one arriving, one computed, two leaving."""

    def check(self, *, stage: int, device_type: str) -> None:
        """Raise ConfigError for what this version does not do. Needs no process group."""
        if self.device == "none":
            return
        if stage == 0:
            rule = "ZeRO stage 0 keeps whole optimizer states on every process"
            raise ConfigError(Problem(f"{FIELD}.device", self.device, rule, "set zero_optimization.stage to 1, 2 or 3"))
        if device_type != "cpu":
            rule = "files are mapped into host memory, and copies to and from a GPU are not written yet"
            raise ConfigError(Problem(f"{FIELD}.device", self.device, rule, 'use "none", and a higher stage or more processes'))

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Nothing yet: what goes to files exists once the model is sharded; the engine moves it then."""
        return parts if self.device == "none" else parts.with_(applied=(*parts.applied, f"optimizer offload({self.path})"))

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Of the states that others priced, what is in files; and the pieces that are in memory during the step."""
        if self.device == "none":
            return ledger
        sharded = (ledger.dp_shard > 1) | (ledger.compute_bytes is not None)
        zero = np.zeros_like(ledger.dp_shard)
        states = ledger.memory.get("optimizer", zero) - ledger.optimizer_scalar_bytes * len(facts.trainable)  # step counts stay in memory
        gradients = states // max(1, ledger.optimizer_tensors)  # without the padding of the buffers that they were reduced in
        in_files = np.where(sharded, ledger.memory.get("parameters", zero), 0) + gradients + states
        return ledger.add_memory("files", in_files).add_memory("step_buffers", np.minimum(in_files, self.buffer_bytes * self.buffer_count))
