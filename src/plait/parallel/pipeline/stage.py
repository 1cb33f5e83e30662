"""One pipeline rank's part of a model, in place: the model keeps its own `forward`, and each stage
runs the part of it that it owns.

The list of blocks keeps its length. To run a stage, blocks outside of it are replaced by
placeholders for the time of the call: the one before the stage returns what arrived from the stage
before, the last block of the stage ends the forward. What a model computes before its blocks is not
known on later stages: it is NaN there, unless the cut says that a stage computes it again. Names of
parameters stay; a rank has only its own, and in the place of others stands what cannot be used: NaN
where the model's code passes over it with values that are not known either, an error elsewhere.
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
from plait.model.stages import StageCut, stage_at
from plait.model.unavailable import Unavailable
from plait.parallel.pipeline.placeholders import (
    PlaceholderBlock,
    StageEnd,
    absent,
    placeholder_block,
    stage_exit,
)
from plait.parallel.tensor.styles import Region

Run = Callable[[nn.Module], Any]
"""Calls the model on one micro-batch."""


@dataclass
class Stage:
    """One stage on this rank."""

    index: int
    first: bool
    last: bool
    blocks: tuple[str, ...]
    """Names of its blocks."""
    view: dict[str, nn.Module] = field(repr=False)
    """What stands in the list of blocks while it runs."""
    stage_input: PlaceholderBlock | None = field(repr=False)
    before: tuple[PlaceholderBlock, ...] = field(repr=False)
    """The placeholders of the blocks before the stage."""
    unknown: tuple[nn.Embedding, ...] = field(repr=False)
    """Embeddings of the front whose values the stage does not need: they return NaN and cost
    nothing.
    """


@dataclass
class PassedOver:
    """Stands for a parameter of another stage that the model's code passes over."""

    module: nn.Module
    leaf: str
    shape: torch.Size
    device: torch.device

    def set(self, dtype: torch.dtype) -> None:
        """As a tensor of NaN without memory."""
        held = self.module.__dict__.get(self.leaf)
        if not isinstance(held, torch.Tensor) or held.dtype != dtype:
            self.module.__dict__[self.leaf] = torch.full(
                (), float("nan"), dtype=dtype, device=self.device
            ).expand(self.shape)


@dataclass
class StagedModel:
    """A model of which this rank has some stages."""

    model: nn.Module
    cut: StageCut
    stages: dict[int, Stage]
    region: Region | None
    """What tensor parallelism shares; it knows the length of a sequence that is split over tp."""
    passed_over: tuple[PassedOver, ...] = field(repr=False)

    def run(self, stage: Stage, call: Run, received: Any = None, *, length: int = 0) -> Any:
        """Forward of one stage: the model's output on the last, else what its last block returns.

        `received` is what the last block of the stage before returned, and `length` its sequences'
        length where tp splits them; not needed on the first.
        """
        if self.region is not None and not stage.first:
            self.region.length = length
        with self._as(stage, received):
            try:
                output = call(self.model)
            except StageEnd as end:
                output = end.output
                end.__traceback__ = None
                return leave_forward(self.model, output)
        if not stage.last:
            raise ModelError(
                f"pipeline stage {stage.index}: the model ended without running {stage.blocks[-1]};"
                " every block must run in every step"
            )
        return output

    @contextmanager
    def _as(self, stage: Stage, received: Any) -> Iterator[None]:
        modules = own_children(self.model.get_submodule(self.cut.container))
        resident = dict(modules)
        forwards: dict[nn.Embedding, Callable[..., Any] | None] = {}
        modules.update(stage.view)
        if stage.stage_input is not None:
            stage.stage_input.plait_value = received
            unknown = tree_map(partial(_unknown_like, dense=self.cut.writes), received)
            # What a model makes of an embedding besides (masks) takes its dtype from it.
            dtype = next(
                (
                    t.dtype
                    for t in tree_leaves(received)
                    if isinstance(t, torch.Tensor) and t.is_floating_point()
                ),
                None,
            )
            for module in stage.before:
                module.plait_value = unknown
            if dtype is not None:
                for parameter in self.passed_over:
                    parameter.set(dtype)
            for embedding in stage.unknown:
                forwards[embedding] = embedding.__dict__.get("forward")
                embedding.__dict__["forward"] = partial(
                    _unknown_embedding, embedding, embedding.forward, dtype, self.cut.writes
                )
        try:
            yield
        finally:
            modules.update(resident)
            if stage.stage_input is not None:
                for module in (stage.stage_input, *stage.before):
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
    """Take from `model`, in place, what does not belong to the stages `indices`."""
    names = {
        f"{cut.container}.{child}" if cut.container else child: child
        for child in own_children(model.get_submodule(cut.container))
    }
    blocks = {name: model.get_submodule(name) for name in cut.blocks}
    front = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and f"{name}.weight" in cut.first_stage
    }
    passed_over = _drop_parameters(model, cut, set(indices), device)
    modules = own_children(model.get_submodule(cut.container))
    others: dict[str, PlaceholderBlock] = {}
    for at, name in enumerate(cut.blocks):
        stage = stage_at(cut.bounds, at)
        others[name] = (
            placeholder_block(blocks[name])
            if stage in indices
            else absent(blocks[name], partial(_absent, name, stage))
        )
    stages = {}
    for index in indices:
        low = cut.bounds[index]
        high = cut.bounds[index + 1]
        last = index == cut.stages - 1
        view = {
            names[name]: blocks[name] if low <= at < high else others[name]
            for at, name in enumerate(cut.blocks)
        }
        if not last:
            view[names[cut.blocks[high - 1]]] = stage_exit(blocks[cut.blocks[high - 1]])
        earlier = tuple(others[name] for name in cut.blocks[:low])
        stage_input = earlier[-1] if index else None
        unknown = tuple(
            module for name, module in front.items() if index not in cut.recomputed.get(name, ())
        )
        stages[index] = Stage(
            index, index == 0, last, cut.blocks[low:high], view, stage_input, earlier[:-1], unknown
        )
    own = {name for stage in stages.values() for name in stage.blocks}
    for name in cut.blocks:
        if name not in own:
            modules[names[name]] = others[name]
    return StagedModel(model, cut, stages, region, passed_over)


def _absent(block: str, stage: int, name: str) -> str:
    return (
        f"parallel.pp: the model reads {block}.{name} outside of that block, which belongs to stage"
        f" {stage} and another rank; a pipeline stage has the tensors of its own blocks only; use"
        " parallel.pp = 1"
    )


def _drop_parameters(
    model: nn.Module, cut: StageCut, own: set[int], device: torch.device
) -> tuple[PassedOver, ...]:
    """Take parameters outside of the blocks that are used on other stages only. Those that an
    earlier stage uses are NaN here, without memory, because the model's code still passes over
    them; any use of another is an error.
    """
    begin = max(cut.bounds[stage] for stage in own)
    passed_over = []
    for name, stages in cut.owners.items():
        if stages & own or any(name.startswith(f"{block}.") for block in cut.blocks):
            continue
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        parameter = own_parameters(module)[leaf]
        assert parameter is not None
        own_parameters(module)[leaf] = None
        local = local_tensor(parameter.detach())
        if cut.first_use(name) < begin:
            passed_over.append(PassedOver(module, leaf, local.shape, device))
            passed_over[-1].set(parameter.dtype)
        else:
            where = ", ".join(str(stage) for stage in sorted(stages))
            module.__dict__[leaf] = Unavailable(
                f"parallel.pp: the model uses {name} on stage {', '.join(map(str, sorted(own)))},"
                f" and it belongs to stage {where}: the forward of this batch takes another way"
                " through the model than the one it was cut by; use parallel.pp = 1",
                local,
            )
    return tuple(passed_over)


def _nan(
    shape: Sequence[int], dtype: torch.dtype | None, device: torch.device, *, dense: bool
) -> torch.Tensor:
    """NaN without memory; `dense` where the model may write to it."""
    if dense:
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(*shape)


def _unknown_like(value: Any, *, dense: bool) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return _nan(value.shape, value.dtype, value.device, dense=dense)


def _unknown_embedding(
    embedding: nn.Embedding,
    forward: Callable[..., Any],
    dtype: torch.dtype | None,
    dense: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """NaN of an embedding's shape; a class with a forward of its own (a table of positions) says
    that shape itself.
    """
    if type(embedding).forward is nn.Embedding.forward and args:
        return _nan((*args[0].shape, embedding.embedding_dim), dtype, args[0].device, dense=dense)
    output = forward(*args, **kwargs)
    if not isinstance(output, torch.Tensor):
        return output
    return _nan(output.shape, dtype or output.dtype, output.device, dense=dense)
