"""For users of Megatron: `initialize_model_parallel` with its sizes, and its rank queries as attributes of what it returns.

No module globals: the object is passed to where it is needed. Processes that tensor, pipeline and context parallelism do not use are data
parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh, build_mesh
from plait.cluster.topology import place
from plait.errors import ConfigError, Problem


@dataclass(frozen=True)
class ModelParallel:
    """Megatron's `parallel_state`, as a value. Groups of one rank are None."""

    mesh: Mesh

    @property
    def tensor_model_parallel_rank(self) -> int:
        """This process in its tensor parallel group."""
        return self.mesh.coordinates["tp"]

    @property
    def tensor_model_parallel_world_size(self) -> int:
        """Ranks of a tensor parallel group."""
        return self.mesh.layout.tp

    @property
    def tensor_model_parallel_group(self) -> dist.ProcessGroup | None:
        """For `plait.comm.collectives`."""
        return self.mesh.group("tp")

    @property
    def pipeline_model_parallel_rank(self) -> int:
        """This process's stage."""
        return self.mesh.coordinates["pp"]

    @property
    def pipeline_model_parallel_world_size(self) -> int:
        """Number of stages."""
        return self.mesh.layout.pp

    @property
    def pipeline_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks of one column of stages."""
        return self.mesh.group("pp")

    @property
    def context_parallel_rank(self) -> int:
        """This process's part of a sequence."""
        return self.mesh.coordinates["cp"]

    @property
    def context_parallel_world_size(self) -> int:
        """Parts of a sequence."""
        return self.mesh.layout.cp

    @property
    def data_parallel_rank(self) -> int:
        """This process's slice of the batch."""
        return self.mesh.dp_index

    @property
    def data_parallel_world_size(self) -> int:
        """Slices of the batch."""
        return self.mesh.layout.dp

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same part of the model."""
        return self.mesh.group("dp_replicate", "dp_shard")

    @property
    def is_pipeline_first_stage(self) -> bool:
        """Whether this process embeds."""
        return self.pipeline_model_parallel_rank == 0

    @property
    def is_pipeline_last_stage(self) -> bool:
        """Whether this process computes the loss."""
        return self.pipeline_model_parallel_rank == self.mesh.layout.pp - 1


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1, *, context_parallel_size: int = 1
) -> ModelParallel:
    """Groups for the given sizes over the processes that exist. Raises ConfigError when their product does not divide the number of
    processes."""
    world = place().world_size
    product = tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size
    if product < 1 or world % product:
        sizes = f"{tensor_model_parallel_size} x {pipeline_model_parallel_size} x {context_parallel_size}"
        raise ConfigError(
            Problem(
                "tensor x pipeline x context model parallel size",
                sizes,
                f"{world} processes are not a multiple of {product}",
                f"use sizes whose product divides {world}",
            )
        )
    layout = Layout(pp=pipeline_model_parallel_size, dp_shard=world // product, cp=context_parallel_size, tp=tensor_model_parallel_size)
    return ModelParallel(build_mesh(layout))
