"""Offload of optimizer states and gradients (DeepSpeed's `offload_optimizer`).

They are stored on the device, in host memory, or in files. Master weights go to host memory with
them, and to files if `parameter_offload` says so.

This module has only the settings, their refusals and their cost. Host memory is an argument of the
call that shards (`data`), and the optimizer then runs torch's CPU kernels. `arena` stores tensors
in files, and `optim.disk_optimizer` is the step over them.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from plait.cluster import accelerator
from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, Problem
from plait.model.facts import ModelFacts, model_facts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.offload.units import offloaded_bytes_of, offloaded_units
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext

FIELD = "zero_optimization.offload_optimizer"


class OptimizerOffload(Technique):
    """Placement of the optimizer states."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Place of the states. none: the device. cpu: host memory. nvme: files."""
    pin_memory: bool = True
    """cpu: whether to pin the memory, so that copies overlap with computation on the device."""
    path: str | None = None
    """nvme: the folder of the files."""
    buffer_bytes: int = 0
    """nvme: bytes of a chunk of the step: parameters, gradients and states together."""
    buffer_count: int = 4
    """nvme: chunks in memory at once: those being read, one computed, and those being written."""
    ratio: float = 1.0
    """Share of the parameters whose master weights, gradients and states are offloaded, above 0.

    Units are offloaded as a whole.
    """

    def check(self, context: TechniqueContext) -> None:
        """Refuse combinations that are not supported.

        ZeRO stage 0 is refused where the configuration is resolved.

        Raises:
            ConfigError: The device does not support this placement.
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
                " implemented yet"
            )
            raise ConfigError(Problem(f"{FIELD}.device", self.device, rule, 'use "cpu" or "none"'))

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Store the placement in the settings of the technique that shards.

        Files come later: the engine moves the shards once they exist.
        """
        if self.device == "none":
            return parts
        on_host = self.device == "cpu"
        pinned = on_host and self.pin_memory and accelerator.is_accelerator(mesh.device)
        names = set()
        for unit in offloaded_units(model_facts(parts.model, parts.blocks), self.ratio):
            if unit >= 0:
                names.add(parts.blocks[unit])
            else:
                # The parameters outside of the blocks.
                names.add("")
        return parts.with_shard(
            master_weights_on_host=on_host,
            pin_master_weights=pinned,
            offloaded_units=frozenset(names),
        )

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Count the offloaded states as host memory or files, and add the buffers of a step."""
        if self.device == "none":
            return ledger
        zero = np.zeros_like(ledger.dp_shard)
        on_host = self.device == "cpu"
        moved = zero
        for parameter, padded, unpadded in offloaded_bytes_of(facts, ledger, self.ratio):
            if on_host:
                # Master weights. In files `ParameterOffload` accounts for them.
                moved = moved + padded
            if not parameter.trainable:
                continue
            moved = moved + unpadded * ledger.optimizer_tensors
            if on_host:
                # Gradients stay padded, as they were reduced. Step counts are on the host too.
                moved = moved + padded + ledger.optimizer_scalar_bytes
            else:
                moved = moved + unpadded
        if on_host:
            return ledger.add_memory("host", moved)

        ledger = ledger.add_memory("files", moved)
        chunks = np.minimum(ledger.memory["files"], self.buffer_bytes * self.buffer_count)
        # Buffers of shards exist while the model computes and chunks during the step, so only the
        # larger of the two counts.
        shard_buffers = ledger.memory.get("step_buffers", zero)
        return ledger.add_memory("step_buffers", np.maximum(chunks, shard_buffers) - shard_buffers)
