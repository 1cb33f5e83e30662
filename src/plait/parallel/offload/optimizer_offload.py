"""Where optimizer states and gradients are stored: on the device, in host memory, or in files
(DeepSpeed's `offload_optimizer`). Master weights go to host memory with them, and to files where
`parameter_offload` says so.

Only the settings, what they refuse and what they cost are here. Host memory is an argument of the
call that shards (`data`); the optimizer then runs torch's kernels for CPUs. The files are `arena`,
the step over them is `optim.disk_optimizer`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from plait.cluster import accelerator
from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, Problem
from plait.model.facts import ModelFacts, model_facts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.offload.units import held_of, offloaded_units
from plait.parallel.technique import Context, Parts, Technique

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
    """nvme: elements of a chunk of the step, its parameters, gradients and states together."""
    buffer_count: int = 4
    """nvme: chunks in memory at once: those being read, one computed, those being written."""
    ratio: float = 1.0
    """The share of the parameters whose master weights, gradients and states are offloaded, in
    complete units; above 0.
    """

    def check(self, context: Context) -> None:
        """Raise ConfigError for what this version does not do. ZeRO stage 0 is refused where the
        configuration is resolved.
        """
        if self.device == "cpu" and context.device_type == "cpu":
            rule = "the device is the CPU, whose memory is the host's: nothing would move"
            raise ConfigError(
                Problem(
                    f"{FIELD}.device", self.device, rule, 'use "none", or "nvme" with a nvme_path'
                )
            )
        if self.device == "nvme" and context.device_type != "cpu":
            rule = (
                "files are mapped into host memory, and copies to and from a GPU are not"
                " written yet"
            )
            raise ConfigError(Problem(f"{FIELD}.device", self.device, rule, 'use "cpu" or "none"'))

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Leave for the technique that shards what it is to ask of torch. Files come later: the
        engine moves what is sharded by then.
        """
        if self.device == "none":
            return parts
        on_host = self.device == "cpu"
        pinned = on_host and self.pin_memory and accelerator.is_one(mesh.device)
        chosen = offloaded_units(model_facts(parts.model, parts.blocks), self.ratio)
        units = frozenset(parts.blocks[unit] if unit >= 0 else "" for unit in chosen)
        return parts.with_shard(
            master_weights_on_host=on_host, pin_master_weights=pinned, offloaded_units=units
        )

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Of the states that others priced, what is on the host or in files; and the chunks that
        are in memory during the step.
        """
        if self.device == "none":
            return ledger
        zero = np.zeros_like(ledger.dp_shard)
        on_host = self.device == "cpu"
        moved = zero
        for parameter, padded, held in held_of(facts, ledger, self.ratio):
            if on_host:
                # the master weights; in files they count with the parameters
                moved = moved + padded
            if parameter.trainable:
                moved = moved + held * ledger.optimizer_tensors
                # On the host gradients are as they were reduced, padded, and step counts are there
                # too.
                moved = moved + (padded + ledger.optimizer_scalar_bytes if on_host else held)
        if on_host:
            return ledger.add_memory("host", moved)
        ledger = ledger.add_memory("files", moved)
        pieces = np.minimum(ledger.memory["files"], self.buffer_bytes * self.buffer_count)
        # shards while the model computes, which is another time
        others = ledger.memory.get("step_buffers", zero)
        return ledger.add_memory("step_buffers", np.maximum(pieces, others) - others)
