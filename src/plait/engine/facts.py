"""Read-only properties of an engine: its model, its place among the ranks, its batch sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plait.cluster.mesh import Mesh
from plait.config.resolving.resolve import Resolved
from plait.parallel.hooks import Hooks
from plait.parallel.parts import Parts
from plait.sharded.model import ShardedModel
from plait.sharded.step import Stepper


class EngineFacts:
    """Properties of an engine that follow from its parts. It has no state of its own.

    Attributes:
        sharded: The model on its layout, with the hooks of its steps.
        config: The resolved configuration.
        stepper: Optimizer step of the model.
        global_steps: Number of steps so far, skipped ones included.
        skipped_steps: Number of steps that were skipped.
    """

    sharded: ShardedModel
    config: Resolved
    stepper: Stepper
    global_steps: int
    skipped_steps: int

    @property
    def parts(self) -> Parts:
        """The model after all techniques were applied, and their notes."""
        return self.sharded.parts

    @property
    def hooks(self) -> Hooks:
        """Hooks of a step."""
        return self.sharded.hooks

    @property
    def mesh(self) -> Mesh:
        """Mesh of the ranks."""
        return self.sharded.mesh

    @property
    def model(self) -> nn.Module:
        """The user's model, sharded in place."""
        return self.sharded.model

    module = model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Optimizer over this rank's shards."""
        return self.stepper.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """LR scheduler, or None."""
        return self.stepper.scheduler

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.mesh.device

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.mesh.layout.world_size

    @property
    def dp_rank(self) -> int:
        """Index of the slice of the batch that this rank reads."""
        return self.mesh.dp_index

    @property
    def dp_size(self) -> int:
        """Number of slices of the batch."""
        return self.mesh.layout.dp

    def train_batch_size(self) -> int:
        """Return the number of samples per step over all ranks."""
        return self.config.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples per micro-batch on one rank."""
        return self.config.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches per step."""
        return self.config.batch.accumulation
