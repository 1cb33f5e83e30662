"""Where a model is cut into pipeline stages, as data: which stage owns which block and which other parameter. Never changes a model.

The blocks must be one chain in one list: each takes what the one before it returned. What a model computes before its first block (the
front: embeddings) belongs to the first stage, what it computes after the last (the back: final norm, head) to the last. A parameter that
is used by several stages (tied embeddings) lives on each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.model.facts import tied_names


@dataclass(frozen=True)
class StageCut:
    """The stages of a model."""

    container: str
    """Name of the list that holds the blocks; empty where the model is the list."""
    blocks: tuple[str, ...]
    bounds: tuple[int, ...]
    """Stage s owns the blocks from bounds[s] up to bounds[s + 1]."""
    owners: dict[str, frozenset[int]]
    """Parameter name to the stages that use it; tied names share one entry's value."""
    front: frozenset[str]
    """Names of the parameters that are used before the first block."""
    first_names: dict[str, str] = field(default_factory=dict)
    """Tied parameter to the first of its names, which a later stage may not have."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def shared(self) -> dict[str, frozenset[int]]:
        """First name of every parameter that several stages use, and the stages."""
        return {name: stages for name, stages in self.owners.items() if len(stages) > 1}


def cut_model(model: nn.Module, blocks: Sequence[str], bounds: Sequence[int]) -> StageCut:
    """Owners of all parameters for stages of the blocks bounds[s]:bounds[s + 1]. Raises ModelError where the blocks are not one chain."""
    container = block_list(model, blocks)
    stages = len(bounds) - 1
    stage_of = {name: next(s for s in range(stages) if index < bounds[s + 1]) for index, name in enumerate(blocks)}
    front = front_parameters(model, blocks)
    owners: dict[str, frozenset[int]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        block = next((b for b in blocks if name.startswith(f"{b}.")), None)
        owners[name] = frozenset({stage_of[block] if block is not None else 0 if name in front else stages - 1})
    first_names = {}
    for group in tied_names(model):
        first_names.update(dict.fromkeys(group, group[0]))
        together = frozenset().union(*(owners[name] for name in group))
        owners.update(dict.fromkeys(group, together))
    return StageCut(container, tuple(blocks), tuple(bounds), owners, front, first_names)


def block_list(model: nn.Module, blocks: Sequence[str]) -> str:
    """The name of the one list that holds all blocks. Raises ModelError where there is none."""
    if not blocks:
        raise ModelError(
            f"parallel.pp > 1: {type(model).__name__} has no list of equal blocks to cut into stages; name them in parallel.blocks"
        )
    parents = {block.rpartition(".")[0] for block in blocks}
    if len(parents) > 1:
        raise ModelError(
            f"parallel.pp > 1: the blocks are in {len(parents)} lists ({', '.join(sorted(parents)[:3])}), and stages are cut from one; "
            "name the blocks of one list in parallel.blocks"
        )
    (parent,) = parents
    held = [f"{parent}.{child}" if parent else child for child, _ in model.get_submodule(parent).named_children()]
    if list(blocks) != held:
        raise ModelError(
            f"parallel.pp > 1: {parent or 'the model'} holds {len(held)} modules and {len(blocks)} of them are blocks; stages are cut from "
            "whole lists: name all of them in parallel.blocks"
        )
    return parent


def front_parameters(model: nn.Module, blocks: Sequence[str]) -> frozenset[str]:
    """Parameters outside of the blocks that are used before the first block.

    From Transformers' pipeline plan where the model has one; else by running the model without its blocks on `meta`, where it takes token
    ids; else the parameters that were registered before the blocks.
    """
    rest = [name for name, _ in model.named_parameters(remove_duplicate=False) if not any(name.startswith(f"{b}.") for b in blocks)]
    parent = blocks[0].rpartition(".")[0]
    for find in (_front_by_plan, _front_by_trial):
        modules = find(model, blocks, parent)
        if modules is not None:
            return frozenset(name for name in rest if any(name == m or name.startswith(f"{m}.") for m in modules))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    first = names.index(next(name for name in names if name.startswith(f"{blocks[0]}.")))
    return frozenset(name for name in rest if names.index(name) < first)


def _front_by_plan(model: nn.Module, blocks: Sequence[str], parent: str) -> list[str] | None:
    """Modules that Transformers' pp_plan names before the list of blocks."""
    prefix, _, leaf = parent.rpartition(".")
    plan: dict[str, Any] | None = getattr(model.get_submodule(prefix), "_pp_plan", None) or getattr(
        getattr(model, "config", None), "base_model_pp_plan", None
    )
    if not plan or leaf not in plan:
        return None
    before = list(plan)[: list(plan).index(leaf)]
    return [f"{prefix}.{name}" if prefix else name for name in before]


def _front_by_trial(model: nn.Module, blocks: Sequence[str], parent: str) -> list[str] | None:
    """Modules that own parameters and run before the first block, seen on a copy on `meta` whose blocks do nothing."""
    if not hasattr(model, "config"):
        return None
    trial = _meta_copy(model, parent)
    seen: list[str] = []
    passed = [False]

    def note(name: str) -> Any:
        def hook(*_: Any) -> None:
            if not passed[0]:
                seen.append(name)

        return hook

    class Pass(nn.Module):
        def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            passed[0] = True
            return hidden

    holder = trial.get_submodule(parent)
    for child in list(holder._modules):
        holder._modules[child] = Pass()
    for name, module in trial.named_modules():
        if name and any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(note(name))
    try:
        with torch.no_grad():
            trial.eval()(input_ids=torch.zeros(1, 4, dtype=torch.int64, device="meta"))
    except Exception:  # whatever a model's code raises on inputs that it was not made for
        return None
    return seen if passed[0] else None


def _meta_copy(model: nn.Module, parent: str) -> nn.Module:
    """The model on `meta`, without copying its weights or its blocks."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    for block in model.get_submodule(parent).children():
        memo[id(block)] = nn.Identity()
    return copy.deepcopy(model, memo)
