"""Offload of optimizer states, parameter shards and activations: settings, checks and costs.

`OptimizerOffload` (DeepSpeed's `offload_optimizer`) stores states and gradients on the device, in
host memory, or in files. If they are in host memory, an argument of `fully_shard` moves the master
weights there as well, and the optimizer runs torch's CPU kernels. If they are in files,
`offload.arena` stores the tensors and `optim.disk_optimizer` updates them.

`ParameterOffload` (DeepSpeed's `offload_param`) stores parameter shards on the device, in host
memory, or in files. Parameters are gathered from these shards. The shards are also the master
weights that the optimizer updates, and no other copy exists between two steps. Shards in files are
prefetched for the unit that is gathered next.

`ActivationOffload` moves the saved activations of the first blocks of a model to host memory or
files. The setting is a fraction of the blocks, because offloading more blocks than can overlap with
computation takes extra time. `activations.activation_store` selects and stores the tensors, and
`recompute` replaces the forward of the blocks. Only the input of a recomputed block is offloaded.
Results that selective recomputation saves stay on the device.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from plait.cluster import accelerator
from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, ModelError, Problem
from plait.model.facts import ModelFacts, model_facts
from plait.parallel.accounting.ledger import Ledger, offloaded_bytes_of, offloaded_units
from plait.parallel.activations.activation_store import (
    ActivationStore,
    DiskStore,
    HostStore,
    OffloadedActivations,
)
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile

_OPTIMIZER_FIELD = "zero_optimization.offload_optimizer"
_PARAMETER_FIELD = "zero_optimization.offload_param"
_FILES_NEED_CPU = (
    "files are mapped into host memory, and copies between files and a GPU are not supported"
)


class OptimizerOffload(Technique):
    """Settings that place optimizer states on the device, in host memory or in files."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Place of the states. none: the device. cpu: host memory. nvme: files."""
    pin_memory: bool = True
    """True to pin the host memory (cpu), so that copies overlap with computation on the device."""
    path: str | None = None
    """Folder of the files (nvme)."""
    buffer_bytes: int = 0
    """Bytes of a chunk of the optimizer step (nvme): parameters, gradients and states together."""
    buffer_count: int = 4
    """Number of chunks in memory at once (nvme), to read, compute and write at the same time."""
    ratio: float = 1.0
    """Share of the parameters whose master weights, gradients and states are offloaded, above 0.

    Units are offloaded as a whole.
    """

    def check(self, context: TechniqueContext) -> None:
        """Refuse placements that the device does not support.

        `config.resolving` refuses ZeRO stage 0.

        Raises:
            ConfigError: The device does not support this placement.
        """
        if self.device == "cpu" and context.device_type == "cpu":
            rule = "the device is the CPU, whose memory is the host memory, so nothing would move"
            raise ConfigError(
                Problem(
                    f"{_OPTIMIZER_FIELD}.device",
                    self.device,
                    rule,
                    'use "none", or "nvme" with nvme_path',
                )
            )
        if self.device == "nvme" and context.device_type != "cpu":
            raise ConfigError(
                Problem(
                    f"{_OPTIMIZER_FIELD}.device",
                    self.device,
                    _FILES_NEED_CPU,
                    'use "cpu" or "none"',
                )
            )

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Store the placement in the settings with which `DataParallel` shards.

        The engine moves states to files later, when the shards exist.
        """
        if self.device == "none":
            return parts
        on_host = self.device == "cpu"
        pinned = on_host and self.pin_memory and accelerator.is_accelerator(mesh.device)
        # The unit -1 has the parameters outside the blocks.
        unit_names = (*parts.blocks, "")
        units = offloaded_units(model_facts(parts.model, parts.blocks), self.ratio)
        return parts.with_shard(
            master_weights_on_host=on_host,
            pin_master_weights=pinned,
            offloaded_units=frozenset(unit_names[unit] for unit in units),
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
                # Master weights. `ParameterOffload` counts those in files.
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


class ParameterOffload(Technique):
    """Settings that place parameter shards on the device, in host memory or in files."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Place of the shards. none: the device. cpu: host memory, with the states. nvme: files."""
    with_states: bool = False
    """True if the shards are offloaded only because the optimizer states are.

    A single process that computes in the dtype of its parameters then has no shards, and with nvme
    its parameters stay in memory.
    """
    ratio: float = 1.0
    """Share of the parameters that is offloaded, above 0. Units are offloaded as a whole.

    It is the ratio of the states if both are stored together.
    """
    path: str | None = None
    """Folder of the files (nvme)."""
    buffer_bytes: int = 0
    """Bytes of one buffer (nvme)."""
    buffer_count: int = 5
    """Number of buffers (nvme), which bounds the memory of shards while the model computes."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of all buffers of the pool together."""
        return self.buffer_bytes * self.buffer_count

    def check(self, context: TechniqueContext) -> None:
        """Refuse placements that the device does not support.

        Raises:
            ConfigError: The device does not support files.
        """
        if self.device == "nvme" and not self.with_states and context.device_type != "cpu":
            raise ConfigError(
                Problem(
                    f"{_PARAMETER_FIELD}.device",
                    self.device,
                    _FILES_NEED_CPU,
                    'use "cpu" with offload_optimizer.device = "cpu", or "none"',
                )
            )

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Request sharding even in a single process, because the engine moves shards to files."""
        if self.device != "nvme" or self.with_states:
            return parts
        return parts.with_shard(always_shard=True)

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Count parameters in files as bytes in files, and add the buffer pool for reads.

        `OptimizerOffload.account` counts parameters in host memory.
        """
        if self.device != "nvme":
            return ledger
        # See `with_states`.
        sharded = (
            (ledger.dp_shard > 1) | (ledger.compute_bytes is not None) | (not self.with_states)
        )
        shards = (padded for _, padded, _ in offloaded_bytes_of(facts, ledger, self.ratio))
        in_files = np.where(sharded, sum(shards, np.zeros_like(ledger.dp_shard)), 0)
        return ledger.add_memory("files", in_files).add_memory(
            "step_buffers", np.minimum(in_files, self.pool_bytes)
        )


class ActivationOffload(Technique):
    """Settings of activation offload: the fraction of the blocks, and the store."""

    fraction: float = 0.0
    """Fraction of a rank's blocks that are offloaded, beginning with its first block."""
    device: Literal["cpu", "disk"] = "cpu"
    """Store: pinned host memory (cpu) or files (disk)."""
    path: str | None = None
    """Folder of the files, with device disk."""

    def blocks(self, count: int) -> int:
        """Return how many of `count` blocks are offloaded."""
        return round(self.fraction * count)

    def check(self, context: TechniqueContext) -> None:
        """Raise ConfigError or ModelError for settings that cannot work or have no effect."""
        if not self.fraction:
            return
        field = "parallel.activation_offload"
        has_model = context.model is not None
        blocks = context.blocks
        if has_model and not blocks:
            raise ModelError(
                f"{field}.fraction = {self.fraction:g}: the model has no repeated blocks; name some"
                " with parallel.blocks, or use 0"
            )
        if context.device_type == "cpu" and self.device == "cpu":
            rule = "the device is the CPU, whose memory is the host memory, so a copy frees nothing"
            raise ConfigError(
                Problem(f"{field}.device", "cpu", rule, 'use "disk" with a path, or fraction 0')
            )
        if has_model and not self.blocks(len(blocks)):
            rule = f"this is less than half a block, because the model has {len(blocks)}"
            remedy = f"use {1 / len(blocks):.3g} or more, or 0"
            raise ConfigError(Problem(f"{field}.fraction", self.fraction, rule, remedy))
        if context.technique(Compile).enabled:
            rule = "the compiler decides what a compiled block saves"
            remedy = "use 0, or compile.enabled = false"
            raise ConfigError(Problem(f"{field}.fraction", self.fraction, rule, remedy))

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Create the store, which `Recompute.apply` installs in the blocks."""
        count = self.blocks(len(parts.blocks))
        if not count:
            return parts
        store: ActivationStore
        if self.device == "cpu":
            store = HostStore(mesh.device)
        else:
            store = DiskStore(Path(self.path or "."), mesh.device)
        return replace(parts, offloaded_activations=OffloadedActivations(store, count))

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hook that closes the store."""
        offloaded = parts.offloaded_activations
        if offloaded is None:
            return []
        return [offloaded]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Return the ledger unchanged.

        `Recompute.account` adds the measured activations, those in the store included.
        """
        return ledger
