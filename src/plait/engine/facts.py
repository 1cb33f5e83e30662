"""What an engine answers about itself: its model, its place among the processes, the sizes of a
batch. No state of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plait.cluster.mesh import Mesh
from plait.config.resolving.resolve import Resolved
from plait.parallel.hooks import Hooks
from plait.parallel.technique import Parts
from plait.sharded.model import ShardedModel
from plait.sharded.step import Stepper


class EngineFacts:
    """See the module."""

    sharded: ShardedModel
    config: Resolved
    stepper: Stepper
    global_steps: int
    skipped_steps: int

    @property
    def parts(self) -> Parts:
        """What the techniques have made of the model."""
        return self.sharded.parts

    @property
    def hooks(self) -> Hooks:
        """What acts on a step."""
        return self.sharded.hooks

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return self.sharded.mesh

    @property
    def model(self) -> nn.Module:
        """The user's model, sharded in place."""
        return self.sharded.model

    module = model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer over this rank's shards."""
        return self.stepper.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The learning rate schedule, or None."""
        return self.stepper.scheduler

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.mesh.device

    @property
    def rank(self) -> int:
        """This process among all."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.mesh.layout.world_size

    @property
    def dp_rank(self) -> int:
        """Which slice of the batch this rank reads."""
        return self.mesh.dp_index

    @property
    def dp_size(self) -> int:
        """Number of different slices of the batch."""
        return self.mesh.layout.dp

    def train_batch_size(self) -> int:
        """Samples of a step, all ranks."""
        return self.config.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch on one rank."""
        return self.config.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.config.batch.accumulation
