"""One pipeline rank's part of a model, in place: the model keeps its own `forward`, and each stage runs the part of it that it owns.

The list of blocks keeps its length. To run a stage, blocks outside of it are replaced by stand-ins for the time of the call: the one
before the stage returns what arrived from the stage before, the last block of the stage ends the forward. What a model computes before its
blocks is not known on later stages: it is NaN there, so a value that reaches a later block by another way than the chain of blocks is found
at once and never trained on. Names of parameters stay; a rank has only its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from plait._torch import leave_forward, local_tensor, tree_leaves, tree_map
from plait.errors import ModelError
from plait.model.stages import StageCut
from plait.parallel.styles import Region

Run = Callable[[nn.Module], Any]
"""Calls the model on one micro-batch."""


class StageEnd(Exception):
    """Leaves the model's forward after a stage's last block."""

    def __init__(self, output: Any) -> None:
        super().__init__("a pipeline stage ended")
        self.output = output


class _StandIn(nn.Module):
    """In the place of a block. Other attributes that the model's code reads (a layer's type) are the block's."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        registries = set(self.__dict__)
        self.__dict__.update({name: value for name, value in vars(block).items() if name not in registries and name != "forward"})


class Elsewhere(_StandIn):
    """A block of another stage."""

    value: Any = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.value


class _Tail(_StandIn):
    """The last block of a stage that is not the last."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.__dict__["run"] = block.__call__  # the block is no submodule of this: it is registered elsewhere

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StageEnd(self.__dict__["run"](*args, **kwargs))


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
    entrance: Elsewhere | None = field(repr=False)
    before: tuple[Elsewhere, ...] = field(repr=False)
    """What stands for the blocks before the entrance."""


@dataclass
class StagedModel:
    """A model of which this rank has some stages."""

    model: nn.Module
    cut: StageCut
    stages: dict[int, Stage]
    region: Region | None
    """What tensor parallelism shares; it knows the length of a sequence that is split over tp."""
    front: dict[nn.Embedding, Callable[..., Any] | None]
    """Embeddings of the front and the `forward` that was set on each, if any. Where they do not count they return NaN and cost nothing."""

    def run(self, stage: Stage, call: Run, received: Any = None, *, length: int = 0) -> Any:
        """Forward of one stage: the model's output on the last, else what its last block returns.

        `received` is what the last block of the stage before returned, and `length` its sequences' length where tp splits them; not
        needed on the first.
        """
        if self.region is not None and not stage.first:
            self.region.length = length
        with self._as(stage, received):
            try:
                output = call(self.model)
            except StageEnd as end:
                output, end.__traceback__ = end.output, None
                return leave_forward(self.model, output)
        if not stage.last:
            raise ModelError(
                f"pipeline stage {stage.index}: the model ended without running {stage.blocks[-1]}; every block must run in every step"
            )
        return output

    @contextmanager
    def _as(self, stage: Stage, received: Any) -> Iterator[None]:
        modules = self.model.get_submodule(self.cut.container)._modules
        resident = dict(modules)
        modules.update(stage.view)
        if stage.entrance is not None:
            stage.entrance.value = received
            unknown = tree_map(_unknown_like, received)
            # What a model makes of an embedding besides (masks) takes its dtype from it.
            dtype = next((t.dtype for t in tree_leaves(received) if isinstance(t, torch.Tensor) and t.is_floating_point()), None)
            for module in stage.before:
                module.value = unknown
            for embedding in self.front:
                embedding.__dict__["forward"] = partial(_unknown_embedding, embedding.embedding_dim, dtype)
        try:
            yield
        finally:
            modules.update(resident)
            if stage.entrance is not None:
                for module in (stage.entrance, *stage.before):
                    module.value = None
                for embedding, forward in self.front.items():
                    del embedding.__dict__["forward"]
                    if forward is not None:
                        embedding.__dict__["forward"] = forward


def stage_model(model: nn.Module, cut: StageCut, indices: Sequence[int], *, region: Region | None, device: torch.device) -> StagedModel:
    """Take from `model`, in place, what does not belong to the stages `indices`."""
    names = {f"{cut.container}.{child}" if cut.container else child: child for child in model.get_submodule(cut.container)._modules}
    blocks = {name: model.get_submodule(name) for name in cut.blocks}
    front = {
        module: module.__dict__.get("forward")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and f"{name}.weight" in cut.front
    }
    _drop_parameters(model, cut, set(indices), device)
    modules = model.get_submodule(cut.container)._modules
    stages = {}
    for index in indices:
        low, high = cut.bounds[index], cut.bounds[index + 1]
        last = index == cut.stages - 1
        view = {names[name]: blocks[name] if low <= at < high else Elsewhere(blocks[name]) for at, name in enumerate(cut.blocks)}
        if not last:
            view[names[cut.blocks[high - 1]]] = _Tail(blocks[cut.blocks[high - 1]])
        others = [view[names[name]] for name in cut.blocks[:low]]
        stand_ins = tuple(module for module in others if isinstance(module, Elsewhere))
        entrance = stand_ins[-1] if index else None
        stages[index] = Stage(index, index == 0, last, cut.blocks[low:high], view, entrance, stand_ins[:-1])
    own = {name for stage in stages.values() for name in stage.blocks}
    for name in cut.blocks:
        if name not in own:
            modules[names[name]] = Elsewhere(blocks[name])
    return StagedModel(model, cut, stages, region, front)


def _drop_parameters(model: nn.Module, cut: StageCut, own: set[int], device: torch.device) -> None:
    """Parameters outside of the blocks that are used on other stages only. Those of the front are NaN here, without memory."""
    for name, stages in cut.owners.items():
        if stages & own or any(name.startswith(f"{block}.") for block in cut.blocks):
            continue
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        parameter = module._parameters[leaf]
        assert parameter is not None
        module._parameters[leaf] = None
        if name in cut.front:
            shape = local_tensor(parameter.detach()).shape
            module.__dict__[leaf] = torch.full((), float("nan"), dtype=parameter.dtype, device=device).expand(shape)


def _unknown_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return torch.full((), float("nan"), dtype=value.dtype, device=value.device).expand(value.shape)


def _unknown_embedding(width: int, dtype: torch.dtype | None, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=ids.device).expand(*ids.shape, width)
