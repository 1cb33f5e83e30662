"""Where optimizer states and gradients live: on the device, in host memory, or in files (DeepSpeed's `offload_optimizer`). Master
parameters go to host memory with them, and to files where `parameter_offload` says so.

Only the settings, what they refuse and what they cost are here. Host memory is an argument of the call that shards (`data`); the optimizer
then runs torch's kernels for CPUs. The files are `arena`, the step over them is `engine.disk_optimizer`.
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
        return parts.with_(masters_on_host=on_host, pin_masters=pinned, applied=(*parts.applied, f"optimizer offload({where})"))

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Of the states that others priced, what is on the host or in files; and the pieces that are in memory during the step."""
        if self.device == "none":
            return ledger
        if self.device == "cpu":
            kinds = ("parameters", "gradients", "optimizer")
            return ledger.add_memory("host", np.sum([ledger.memory[kind] for kind in kinds], axis=0, dtype=np.int64))
        zero = np.zeros_like(ledger.dp_shard)
        states = ledger.memory.get("optimizer", zero) - ledger.optimizer_scalar_bytes * len(facts.trainable)  # step counts stay in memory
        gradients = states // max(1, ledger.optimizer_tensors)  # without the padding of the buffers that they were reduced in
        ledger = ledger.add_memory("files", gradients + states)
        pieces = np.minimum(ledger.memory["files"], self.buffer_bytes * self.buffer_count)
        others = ledger.memory.get("step_buffers", zero)  # shards while the model computes, which is another time
        return ledger.add_memory("step_buffers", np.maximum(pieces, others) - others)
