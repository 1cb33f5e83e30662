"""Cut of a model into the stages of one pipeline rank, in place.

Note [Running a stage]
    The model keeps its own `forward`, and each stage runs the part of it that it owns. The list of
    blocks keeps its length. While a stage runs, the blocks outside of it are replaced by
    placeholders: the one before the stage returns what arrived from the previous stage, and the
    last block of the stage ends the forward.

    Values that a model computes before its blocks are not known on later stages. They are NaN
    there, unless the cut says that a stage computes them again.

    Names of parameters do not change. Parameters of other ranks are replaced: by NaN if the model's
    code also passes over them with unknown values, else by a tensor whose use is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from plait._torch.dtensor import local_tensor
from plait._torch.modules import own_children, own_parameters
from plait._torch.operators import tree_leaves, tree_map
from plait._torch.passes import leave_forward
from plait.errors import ModelError
from plait.model.stages import Skeleton, StageCut, stage_of_block
from plait.model.unavailable import UnavailableTensor
from plait.parallel.pipeline.placeholders import (
    PlaceholderBlock,
    StageEnd,
    absent_block,
    placeholder_block,
    stage_exit,
)
from plait.parallel.schedules.schedule import Schedule
from plait.parallel.tensor.styles import Region

Run = Callable[[nn.Module], Any]
"""Function that calls the model on one micro-batch."""


@dataclass
class Stage:
    """Pipeline stage of this rank.

    Attributes:
        index: Number of the stage in the pipeline.
        first: Whether it is the first stage.
        last: Whether it is the last stage.
        blocks: Names of its blocks.
        block_view: Contents of the list of blocks while the stage runs.
        stage_input: Placeholder that returns what arrived; None on the first stage.
        earlier_blocks: Placeholders of the other blocks before the stage.
        skipped_embeddings: Embeddings before the blocks whose values the stage does not need. They
            return NaN and compute nothing.
    """

    index: int
    first: bool
    last: bool
    blocks: tuple[str, ...]
    block_view: dict[str, nn.Module] = field(repr=False)
    stage_input: PlaceholderBlock | None = field(repr=False)
    earlier_blocks: tuple[PlaceholderBlock, ...] = field(repr=False)
    skipped_embeddings: tuple[nn.Embedding, ...] = field(repr=False)


@dataclass
class NanParameter:
    """Stand-in for a parameter of an earlier stage that the model's code still passes over.

    Attributes:
        module: Module that has the parameter.
        leaf: Name of the parameter in the module.
        shape: Shape of the parameter on this rank.
        device: Device of the stand-in.
    """

    module: nn.Module
    leaf: str
    shape: torch.Size
    device: torch.device

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Set the attribute to NaN of a dtype, expanded from one element."""
        current = self.module.__dict__.get(self.leaf)
        if not isinstance(current, torch.Tensor) or current.dtype != dtype:
            self.module.__dict__[self.leaf] = _nan(self.shape, dtype, self.device, dense=False)


@dataclass
class StagedModel:
    """Model of which this rank has some stages. See Note [Running a stage].

    Attributes:
        model: The model, changed in place.
        cut: Blocks and parameters of all stages.
        stages: Stages of this rank, by index.
        region: State that tensor parallelism shares: it knows the length of sequences that are
            split over tp.
        nan_parameters: Stand-ins for parameters of earlier stages.
    """

    model: nn.Module
    cut: StageCut
    stages: dict[int, Stage]
    region: Region | None
    nan_parameters: tuple[NanParameter, ...] = field(repr=False)

    def run(self, stage: Stage, call: Run, received: Any = None, *, length: int = 0) -> Any:
        """Run the forward of one stage.

        Args:
            stage: The stage.
            call: Calls the model on a micro-batch.
            received: Output of the last block of the previous stage; not used on the first stage.
            length: Length of the sequences if tp splits them; not used on the first stage.

        Returns:
            The model's output on the last stage, else the output of the stage's last block.

        Raises:
            ModelError: The model ended without running the last block of the stage.
        """
        if self.region is not None and not stage.first:
            self.region.length = length
        with self._blocks_of(stage, received):
            try:
                output = call(self.model)
            except StageEnd as end:
                output = end.output
                # The frames of the forward would keep its activations alive.
                end.__traceback__ = None
                return leave_forward(self.model, output)
        if not stage.last:
            raise ModelError(
                f"pipeline stage {stage.index}: the model ended without running {stage.blocks[-1]};"
                " every block must run in every step"
            )
        return output

    @contextmanager
    def _blocks_of(self, stage: Stage, received: Any) -> Iterator[None]:
        """Return a context in which blocks of other stages are replaced by placeholders.

        Values that only other stages can compute are NaN in it.
        """
        modules = own_children(self.model.get_submodule(self.cut.container))
        resident = dict(modules)
        forwards: dict[nn.Embedding, Callable[..., Any] | None] = {}
        modules.update(stage.block_view)
        if stage.stage_input is not None:
            stage.stage_input.plait_value = received
            unknown = tree_map(partial(_nan_like, dense=self.cut.writes), received)
            for module in stage.earlier_blocks:
                module.plait_value = unknown
            # Models derive other values, such as masks, in the dtype of the embedding's output.
            dtype = _floating_dtype(received)
            if dtype is not None:
                for parameter in self.nan_parameters:
                    parameter.set_dtype(dtype)
            for embedding in stage.skipped_embeddings:
                forwards[embedding] = embedding.__dict__.get("forward")
                embedding.__dict__["forward"] = partial(
                    _nan_embedding, embedding, embedding.forward, dtype, self.cut.writes
                )
        try:
            yield
        finally:
            modules.update(resident)
            if stage.stage_input is not None:
                for module in (stage.stage_input, *stage.earlier_blocks):
                    module.plait_value = None
                for embedding, forward in forwards.items():
                    del embedding.__dict__["forward"]
                    if forward is not None:
                        embedding.__dict__["forward"] = forward


def stage_model(
    model: nn.Module,
    cut: StageCut,
    indices: Sequence[int],
    *,
    region: Region | None,
    device: torch.device,
) -> StagedModel:
    """Remove the blocks and parameters of other ranks from a model, in place.

    Args:
        model: The model.
        cut: Cut of the model into stages.
        indices: Stages of this rank.
        region: Region of tensor parallelism, if there is one.
        device: Device of stand-ins for parameters of other ranks.
    """
    container = model.get_submodule(cut.container)
    child_names: dict[str, str] = {}
    for child in own_children(container):
        full_name = f"{cut.container}.{child}" if cut.container else child
        child_names[full_name] = child
    blocks = {name: model.get_submodule(name) for name in cut.blocks}
    front_embeddings = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and f"{name}.weight" in cut.first_stage
    }
    nan_parameters = _drop_parameters(model, cut, set(indices), device)

    placeholders: dict[str, PlaceholderBlock] = {}
    for position, name in enumerate(cut.blocks):
        stage = stage_of_block(cut.bounds, position)
        if stage in indices:
            placeholders[name] = placeholder_block(blocks[name])
        else:
            placeholders[name] = absent_block(blocks[name], partial(_absent_message, name, stage))

    stages = {}
    for index in indices:
        low = cut.bounds[index]
        high = cut.bounds[index + 1]
        block_view: dict[str, nn.Module] = {}
        for position, name in enumerate(cut.blocks):
            inside = low <= position < high
            block_view[child_names[name]] = blocks[name] if inside else placeholders[name]
        is_last = index == cut.stages - 1
        if not is_last:
            last_block = cut.blocks[high - 1]
            block_view[child_names[last_block]] = stage_exit(blocks[last_block])
        earlier_blocks = [placeholders[name] for name in cut.blocks[:low]]
        stage_input = earlier_blocks.pop() if index else None
        skipped_embeddings = [
            module
            for name, module in front_embeddings.items()
            if index not in cut.recomputed.get(name, ())
        ]
        stages[index] = Stage(
            index=index,
            first=index == 0,
            last=is_last,
            blocks=cut.blocks[low:high],
            block_view=block_view,
            stage_input=stage_input,
            earlier_blocks=tuple(earlier_blocks),
            skipped_embeddings=tuple(skipped_embeddings),
        )

    # Blocks of other ranks leave the model for good.
    resident = {name for stage in stages.values() for name in stage.blocks}
    modules = own_children(container)
    for name in cut.blocks:
        if name not in resident:
            modules[child_names[name]] = placeholders[name]
    return StagedModel(model, cut, stages, region, nan_parameters)


def _absent_message(block: str, stage: int, name: str) -> str:
    return (
        f"parallel.pp: the model reads {block}.{name} outside of that block, which belongs to stage"
        f" {stage} on another rank, and a pipeline stage has only the tensors of its blocks; use"
        " parallel.pp = 1"
    )


def _drop_parameters(
    model: nn.Module, cut: StageCut, indices: set[int], device: torch.device
) -> tuple[NanParameter, ...]:
    """Remove the parameters outside of the blocks that only other stages use.

    Returns:
        Stand-ins for those that an earlier stage uses: the model's code still passes over them. Any
        use of the others is an error.
    """
    begin = max(cut.bounds[stage] for stage in indices)
    nan_parameters = []
    for name, stages in cut.owners.items():
        if stages & indices or any(name.startswith(f"{block}.") for block in cut.blocks):
            continue
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        parameter = own_parameters(module)[leaf]
        assert parameter is not None
        own_parameters(module)[leaf] = None
        local = local_tensor(parameter.detach())
        if cut.first_use(name) < begin:
            nan_parameters.append(NanParameter(module, leaf, local.shape, device))
            nan_parameters[-1].set_dtype(parameter.dtype)
        else:
            owners = ", ".join(map(str, sorted(stages)))
            own_stages = ", ".join(map(str, sorted(indices)))
            module.__dict__[leaf] = UnavailableTensor(
                f"parallel.pp: the model uses {name} on stage {own_stages}, and it belongs to stage"
                f" {owners}: the forward of this batch takes another path through the model than"
                " the one it was cut by; use parallel.pp = 1",
                local,
            )
    return tuple(nan_parameters)


def _floating_dtype(value: Any) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor in a nested value."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.dtype
    return None


def _nan(
    shape: Sequence[int], dtype: torch.dtype | None, device: torch.device, *, dense: bool
) -> torch.Tensor:
    """Return a tensor of NaN. Only a `dense` one has memory for every element."""
    if dense:
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(tuple(shape))


def _nan_like(value: Any, *, dense: bool) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return _nan(value.shape, value.dtype, value.device, dense=dense)


def _nan_embedding(
    embedding: nn.Embedding,
    forward: Callable[..., Any],
    dtype: torch.dtype | None,
    dense: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return NaN in the shape of an embedding's output."""
    if type(embedding).forward is nn.Embedding.forward and args:
        # [..., embedding_dim]
        return _nan((*args[0].shape, embedding.embedding_dim), dtype, args[0].device, dense=dense)

    # A subclass with its own forward, such as a table of positions, decides the shape itself.
    output = forward(*args, **kwargs)
    if not isinstance(output, torch.Tensor):
        return output
    return _nan(output.shape, dtype or output.dtype, output.device, dense=dense)


@dataclass(frozen=True)
class PipelinePlan:
    """Pipeline of a model, and this rank's stages of it.

    Attributes:
        schedule: Table of the computations of all ranks.
        cut: Blocks and parameters of each stage.
        skeleton: The uncut model without its weights, which is used to check batches.
        staged: Stages of this rank; None until `Pipeline.apply` has cut the model.
    """

    schedule: Schedule
    cut: StageCut
    skeleton: Skeleton
    staged: StagedModel | None = None

    def tied(self) -> dict[str, frozenset[int]]:
        """Return the pp ranks that hold each parameter that several ranks hold.

        Keys are first names of the parameters, in an order that is the same on all ranks.
        """
        ranks_of: dict[str, frozenset[int]] = {}
        for name, stages in self.cut.shared().items():
            ranks = frozenset(self.schedule.stage_ranks[stage] for stage in stages)
            is_first_name = self.cut.first_names.get(name, name) == name
            if len(ranks) > 1 and is_first_name:
                ranks_of[name] = ranks
        return ranks_of
