"""Stages of one pipeline rank: a model in which placeholders replace the blocks of other ranks.

Note [Running a stage]
    The model keeps its own `forward`, and each stage runs its part of it. The list of blocks keeps
    its length. While a stage runs, the blocks outside it are replaced by placeholders. The
    placeholder before the stage returns what arrived from the previous stage. The forward ends
    after the last block of the stage.

    Values that a model computes before its blocks are not known on later stages. They are NaN
    there, unless the cut requires that a stage computes them again.

    Names of parameters do not change. Parameters of other ranks are replaced. If an earlier stage
    uses a parameter first, the replacement is NaN, because the model's code also runs here, with
    unknown values. Otherwise it is a tensor that raises an error when it is used.

Note [Placeholders]
    A model's code does not only call its blocks. It also reads attributes such as a layer's type,
    calls methods that change a setting, and uses submodules. The class of a placeholder is
    therefore a subclass of the block's class, and only calls of the placeholder differ. The
    placeholder of a block of this rank shares the block's attributes, so that a change of one
    changes the other. The placeholder of a block of another rank has the block's submodules
    without their tensors.

Note [Caches of stages]
    A model asks its KV cache how many tokens the cache has seen, and the cache asks its first
    layer, which may belong to another stage. Every stage of a rank therefore has its own
    cache, in which the layers of other stages are replaced by layers of the stage's own blocks.
    The replacements return the same number, and no block writes through the index of a replaced
    layer.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from plait._torch.modules import direct_children, direct_parameters, state_without_tensors
from plait._torch.operators import tree_leaves, tree_map
from plait._torch.passes import leave_forward
from plait._torch.tensors import local_tensor
from plait.errors import InputError, ModelError
from plait.model.sequence import is_inside
from plait.model.stages import Skeleton, StageCut, UnavailableTensor, stage_of_block
from plait.parallel.schedules.schedule import Schedule
from plait.parallel.tensor.styles import Region

Run = Callable[[nn.Module], Any]
"""Function that calls the model on one micro-batch."""


@dataclass
class StagedModel:
    """Model with this rank's stages. See Note [Running a stage].

    Attributes:
        model: The model, changed in place.
        cut: Blocks and parameters of all stages.
        stages: Stages of this rank, by index.
        region: State that tensor-parallel modules share, such as the length of sequences that are
            split over tp.
        nan_parameters: Stand-ins for parameters of earlier stages.
    """

    model: nn.Module
    cut: StageCut
    stages: dict[int, Stage]
    region: Region | None
    nan_parameters: tuple[NanParameter, ...] = field(repr=False)

    @property
    def sequence_length(self) -> int:
        """Length of the sequences if tensor parallelism splits them, else 0."""
        if self.region is None:
            return 0
        return self.region.length

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
                " every block must run in every step; use parallel.pp = 1"
            )
        return output

    @contextmanager
    def _blocks_of(self, stage: Stage, received: Any) -> Iterator[None]:
        """Return a context in which blocks of other stages are replaced by placeholders.

        Values that only other stages can compute are NaN in it.
        """
        modules = direct_children(self.model.get_submodule(self.cut.container))
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
    """Stand-in for an earlier stage's parameter that the model's code still uses.

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
        """Set the attribute to a placeholder: one NaN, expanded to the parameter's shape."""
        current = self.module.__dict__.get(self.leaf)
        if not isinstance(current, torch.Tensor) or current.dtype != dtype:
            self.module.__dict__[self.leaf] = _nan(self.shape, dtype, self.device, dense=False)


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
    child_names = {name: name.rpartition(".")[2] for name in cut.blocks}
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
        block = blocks[name]
        if stage in indices:
            placeholder = _create_placeholder(PlaceholderBlock, block, block.__dict__)
        else:
            message = partial(_absent_message, name, stage)
            attributes = _without_tensors(block, message, "", {})
            placeholder = _create_placeholder(AbsentBlock, block, attributes)
        placeholder.plait_value = None
        placeholders[name] = placeholder

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
            last_name = cut.blocks[high - 1]
            last_block = blocks[last_name]
            stage_exit = _create_placeholder(StageExit, last_block, last_block.__dict__)
            stage_exit.plait_block = last_block.__call__
            block_view[child_names[last_name]] = stage_exit
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
    modules = direct_children(container)
    for name in cut.blocks:
        if name not in resident:
            modules[child_names[name]] = placeholders[name]
    return StagedModel(model, cut, stages, region, nan_parameters)


def _absent_message(block: str, stage: int, name: str) -> str:
    return (
        f"parallel.pp: the model reads {block}.{name} outside that block, which belongs to stage"
        f" {stage} on another rank, and a pipeline stage has only the tensors of its blocks; use"
        " parallel.pp = 1"
    )


def _drop_parameters(
    model: nn.Module, cut: StageCut, indices: set[int], device: torch.device
) -> tuple[NanParameter, ...]:
    """Remove the parameters outside the blocks that only other stages use.

    Returns:
        NaN stand-ins for the removed parameters that an earlier stage uses first. The model's code
            also reads these parameters here. Using any other removed parameter raises an error.
    """
    begin = max(cut.bounds[stage] for stage in indices)
    nan_parameters = []
    for name, stages in cut.owners.items():
        if stages & indices or is_inside(name, cut.blocks):
            continue
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        parameter = direct_parameters(module)[leaf]
        if parameter is None:
            # Another name of a module whose parameter was removed already.
            continue
        direct_parameters(module)[leaf] = None
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


def _nan(
    shape: Sequence[int], dtype: torch.dtype | None, device: torch.device, *, dense: bool
) -> torch.Tensor:
    """Return a tensor of NaN. Without `dense`, all elements share the memory of one."""
    if dense:
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(tuple(shape))


class StageEnd(Exception):
    """Exception that ends the model's forward after the last block of a stage.

    Attributes:
        output: Output of that block.
    """

    def __init__(self, output: Any) -> None:
        super().__init__("a pipeline stage ended")
        self.output = output


def refuse_forward_of_copy(*_: Any, **__: Any) -> NoReturn:
    """Raise InputError in place of the forward of a copied module."""
    raise InputError(
        "this is a copy of a module that was split over processes, and the copy cannot compute with"
        " the other processes; to run its weights, copy them into the trained model"
        " (parameter.copy_ under torch.no_grad()); for a second model, such as a reference model,"
        " copy the model before plait.initialize, and pass the copy to plait.parallelize"
    )


class Placeholder(nn.Module):
    """Module that stands in for a block. See Note [Placeholders]."""

    # Slots are not part of the `__dict__` that the placeholder may share with the block.
    __slots__ = ("plait_block", "plait_value")

    def plait_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the block's forward."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `nn.Module.__call__` would run the hooks, and the recomputation, of the block.
        return self.plait_run(*args, **kwargs)

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """Forward of the placeholder.

        The attributes that the placeholder shares with its block may include a `forward` that was
        assigned to the block. A property takes precedence over this attribute.
        """
        return self.plait_run


class PlaceholderBlock(Placeholder):
    """Placeholder that returns `plait_value` instead of running a block of another stage."""

    __slots__ = ()
    plait_value: Any

    def plait_run(self, *args: Any, **kwargs: Any) -> Any:
        """Return `plait_value`, which a copy does not have, because copies have no slots."""
        if not hasattr(self, "plait_value"):
            refuse_forward_of_copy()
        return self.plait_value


class AbsentBlock(PlaceholderBlock):
    """Placeholder of a block of another rank. Its submodules are not part of this rank's model."""

    __slots__ = ()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Yield only this module."""
        if memo is None:
            memo = set()
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield nothing."""
        return iter(())


class StageExit(Placeholder):
    """Placeholder that runs the last block of a stage and then ends the forward."""

    __slots__ = ()
    plait_block: Callable[..., Any]

    def plait_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block and raise StageEnd with its output."""
        raise StageEnd(self.plait_block(*args, **kwargs))


P = TypeVar("P", bound="Placeholder")


def _create_placeholder(kind: type[P], block: nn.Module, attributes: dict[str, Any]) -> P:
    name = f"{kind.__name__}{type(block).__name__}"
    placeholder: P = object.__new__(types.new_class(name, (kind, type(block))))
    object.__setattr__(placeholder, "__dict__", attributes)
    return placeholder


def _without_tensors(
    module: nn.Module,
    message: Callable[[str], str],
    prefix: str,
    copies: dict[nn.Module, nn.Module],
) -> dict[str, Any]:
    """Return the attributes of a module with unavailable parameters and buffers.

    Args:
        module: The module.
        message: Returns the error message for the name of a tensor.
        prefix: Name of the module within the block, with a dot at the end.
        copies: Submodules that were copied so far, so that shared ones stay shared.
    """
    attributes, children, tensors = state_without_tensors(module)
    attributes.pop("forward", None)
    for name, tensor in tensors.items():
        attributes[name] = None
        if isinstance(tensor, torch.Tensor):
            attributes[name] = UnavailableTensor(
                message(f"{prefix}{name}"), local_tensor(tensor.detach())
            )
    for name, child in direct_children(module).items():
        if child is None:
            children[name] = None
            continue
        if child not in copies:
            copies[child] = object.__new__(type(child))
            child_attributes = _without_tensors(child, message, f"{prefix}{name}.", copies)
            object.__setattr__(copies[child], "__dict__", child_attributes)
        children[name] = copies[child]
    return attributes


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
        """Return the pp ranks of each parameter that several ranks hold.

        Keys are the names at which the parameters first occur, in the same order on all ranks.
        """
        ranks_of: dict[str, frozenset[int]] = {}
        for name, stages in self.cut.shared().items():
            ranks = frozenset(self.schedule.stage_ranks[stage] for stage in stages)
            is_first_name = self.cut.first_names.get(name, name) == name
            if len(ranks) > 1 and is_first_name:
                ranks_of[name] = ranks
        return ranks_of


class StageCaches:
    """KV caches of the stages of this rank. See Note [Caches of stages].

    Args:
        staged: The stages.
        make_empty: Returns an empty cache of the complete model, with all of its layers.

    Attributes:
        caches: Cache of each stage, by the stage's index.
    """

    def __init__(self, staged: StagedModel, make_empty: Callable[[], Any]) -> None:
        self.make_empty = make_empty
        self._layers = {index: _cache_layers(staged, index) for index in staged.stages}
        self.caches = {index: self._make_stage_cache(index) for index in staged.stages}

    def _make_stage_cache(self, stage: int) -> Any:
        cache = self.make_empty()
        stage_layers = self._layers[stage]
        # Layers of a model may have several types, such as full and sliding-window attention.
        first: dict[type, int] = {}
        for index in stage_layers:
            first.setdefault(type(cache.layers[index]), index)
        for index, layer in enumerate(cache.layers):
            if index not in stage_layers:
                cache.layers[index] = cache.layers[first.get(type(layer), stage_layers[0])]
        return cache

    def own_layers(self) -> list[Any]:
        """Return the cache layers that this rank's blocks write to."""
        layers = []
        for stage, cache in self.caches.items():
            layers += [cache.layers[index] for index in self._layers[stage]]
        return layers

    def get_seq_length(self) -> int:
        """Return the number of tokens that the caches have seen."""
        stage, cache = next(iter(self.caches.items()))
        return int(cache.layers[self._layers[stage][0]].get_seq_length())


def _cache_layers(staged: StagedModel, stage: int) -> list[int]:
    """Return the indices of the layers of a cache that a stage's blocks write to."""
    stage_layers: set[int] = set()
    for name in staged.stages[stage].blocks:
        indices = [
            getattr(module, "layer_idx", None)
            for module in staged.model.get_submodule(name).modules()
        ]
        block_layers = {index for index in indices if isinstance(index, int)}
        if not block_layers:
            raise ModelError(
                f"parallel.pp: {name} does not record the index of its layer in the KV cache"
                " (`layer_idx` of its attention), so its stage cannot keep keys and values; turn"
                ' the cache off (use_cache=False, or "use_cache": false in the'
                " generation_config.json of the model's folder), or use parallel.pp = 1 (--pp 1)"
            )
        stage_layers |= block_layers
    return sorted(stage_layers)


def for_stage(batch: Any, stage: int) -> Any:
    """Return a micro-batch in which the caches are replaced by the cache of one stage."""
    return _replace_caches(batch, lambda caches: caches.caches[stage])


def with_empty_cache(batch: Any) -> Any:
    """Return a micro-batch in which an empty cache of the complete model replaces the caches."""
    return _replace_caches(batch, lambda caches: caches.make_empty())


def _replace_caches(batch: Any, replacement: Callable[[StageCaches], Any]) -> Any:
    if not isinstance(batch, Mapping):
        return batch
    # Models name this argument differently, so the entries are found by their type.
    replaced = {
        name: replacement(entry) for name, entry in batch.items() if isinstance(entry, StageCaches)
    }
    if not replaced:
        return batch
    return {**batch, **replaced}
