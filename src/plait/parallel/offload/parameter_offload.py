"""Where the shards are stored from which parameters are gathered: on the device, in host memory, or
in files (DeepSpeed's `offload_param`). Shards are the master weights that the optimizer updates;
there is no other copy between two steps. In files they are prefetched for the unit that will be
gathered (`shard_reader`), and the step iterates over them (`optim.disk_optimizer`).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, Problem
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.offload.units import held_of
from plait.parallel.technique import Context, Parts, Technique

FIELD = "zero_optimization.offload_param"


class ParameterOffload(Technique):
    """The tier of the shards."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """none: the device. cpu: host memory, with the states. nvme: files."""
    with_states: bool = False
    """They are there because the optimizer's states are, and not because the file asks for it. With
    nvme (stages 1 and 2) parameters of one process in their own dtype, which are not sharded, then
    stay in memory.
    """
    ratio: float = 1.0
    """The share of the parameters that is offloaded, in complete units: that of the states where
    they are stored together.
    """
    path: str | None = None
    """nvme: the folder."""
    buffer_bytes: int = 0
    """nvme: what one buffer takes."""
    buffer_count: int = 5
    """nvme: buffers of the pool; together they are the most that shards take of memory while the
    model computes.
    """

    @property
    def pool_bytes(self) -> int:
        """Of all buffers."""
        return self.buffer_bytes * self.buffer_count

    def check(self, context: Context) -> None:
        """Raise ConfigError for what this version does not do."""
        if self.device == "nvme" and not self.with_states and context.device_type != "cpu":
            rule = (
                "files are mapped into host memory, and copies to and from a GPU are not"
                " written yet"
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
        """Ask for shards, also of one process: the engine moves them into files afterwards."""
        if self.device != "nvme" or self.with_states:
            return parts
        return parts.with_shard(always_shard=True)

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Of the parameters that others priced, what is in files, and what of it is in memory while
        the model computes. In host memory they are in the account of the states.
        """
        if self.device != "nvme":
            return ledger
        sharded = (
            (ledger.dp_shard > 1) | (ledger.compute_bytes is not None) | (not self.with_states)
        )
        shards = (padded for _, padded, _ in held_of(facts, ledger, self.ratio))
        in_files = np.where(sharded, sum(shards, np.zeros_like(ledger.dp_shard)), 0)
        return ledger.add_memory("files", in_files).add_memory(
            "step_buffers", np.minimum(in_files, self.pool_bytes)
        )
