"""Offload of the shards from which parameters are gathered (DeepSpeed's `offload_param`).

They are stored on the device, in host memory, or in files. Shards are the master weights that the
optimizer updates, and no other copy exists between two steps. In files they are prefetched for the
unit that is gathered next (`shard_reader`), and the step iterates over them
(`optim.disk_optimizer`).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.offload.units import offloaded_bytes_of
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext

FIELD = "zero_optimization.offload_param"


class ParameterOffload(Technique):
    """Placement of the parameter shards."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Place of the shards. none: the device. cpu: host memory, with the states. nvme: files."""
    with_states: bool = False
    """True if they are offloaded because the optimizer states are, without a setting of their own.

    With nvme (stages 1 and 2) a single process does not shard parameters in their own dtype. They
    stay in memory then.
    """
    ratio: float = 1.0
    """Share of the parameters that is offloaded, as complete units.

    It is the ratio of the states if both are stored together.
    """
    path: str | None = None
    """nvme: the folder of the files."""
    buffer_bytes: int = 0
    """nvme: bytes of one buffer."""
    buffer_count: int = 5
    """nvme: buffers of the pool, which bounds the memory of shards while the model computes."""

    @property
    def pool_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.buffer_bytes * self.buffer_count

    def check(self, context: TechniqueContext) -> None:
        """Refuse combinations that are not supported.

        Raises:
            ConfigError: The device does not support files.
        """
        if self.device == "nvme" and not self.with_states and context.device_type != "cpu":
            rule = (
                "files are mapped into host memory, and copies to and from a GPU are not"
                " implemented yet"
            )
            raise ConfigError(
                Problem(
                    f"{FIELD}.device",
                    self.device,
                    rule,
                    'use "cpu" with offload_optimizer.device = "cpu", or "none"',
                )
            )

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Request shards even in a single process. The engine moves them to files afterwards."""
        if self.device != "nvme" or self.with_states:
            return parts
        return parts.with_shard(always_shard=True)

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Count the offloaded parameters as bytes in files, and add the pool that they are read to.

        Parameters in host memory are counted with the optimizer states.
        """
        if self.device != "nvme":
            return ledger
        # A single process that computes in the parameters' dtype has shards only by its setting.
        sharded = (
            (ledger.dp_shard > 1) | (ledger.compute_bytes is not None) | (not self.with_states)
        )
        shards = (padded for _, padded, _ in offloaded_bytes_of(facts, ledger, self.ratio))
        in_files = np.where(sharded, sum(shards, np.zeros_like(ledger.dp_shard)), 0)
        return ledger.add_memory("files", in_files).add_memory(
            "step_buffers", np.minimum(in_files, self.pool_bytes)
        )
