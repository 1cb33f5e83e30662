"""Where a model is cut into pipeline stages, as data: which stage owns which block and which other
parameter. Never changes a model.

The blocks must be one chain in one list: each takes what the one before it returned. What each
stage needs besides is found by running the model without its weights (`dataflow`): what is used
before the first block (embeddings) belongs to the first stage, what is used after the last (final
norm, head) to the last, what blocks of several stages read (a table of positions, an embedding that
later blocks read again) to each of them. A parameter of several stages lives on each of them, and
its gradients are summed.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.model.dataflow import Dataflow, Need, Skeleton, Trace, Untraceable
from plait.model.tied import tied_names
from plait.model.unavailable import output_fields


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
    first_stage: frozenset[str]
    """Names of the parameters that are used before the first block."""
    first_names: dict[str, str] = field(default_factory=dict)
    """Tied parameter to the first of its names, which a later stage may not have."""
    recomputed: dict[str, frozenset[int]] = field(default_factory=dict)
    """Parameter used before the blocks of a stage to the later stages that need what follows from
    it, and compute it again.
    """
    lowest: dict[str, int] = field(default_factory=dict)
    """Parameter to the first block before which, or inside which, it is used, where that was seen.
    """
    writes: bool = True
    """Code outside of the blocks may change values in place."""
    returned: Any = field(default=None, compare=False, repr=False)
    """What a block returned for a few tokens, its tensors on meta; None where that was not seen."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def first_use(self, name: str) -> int:
        """The first block before which a parameter outside of the blocks is used; their number for
        one that is used after the last.
        """
        return self.lowest.get(name, 0 if name in self.first_stage else len(self.blocks))

    def outside_stages(self) -> frozenset[int]:
        """The stages that use parameters outside of the blocks, and always the first and the
        last.
        """
        inside = tuple(f"{block}." for block in self.blocks)
        return frozenset({0, self.stages - 1}).union(
            *(own for name, own in self.owners.items() if not name.startswith(inside))
        )

    def shared(self) -> dict[str, frozenset[int]]:
        """First name of every parameter that several stages use, and the stages."""
        return {name: stages for name, stages in self.owners.items() if len(stages) > 1}


def cut_model(
    model: nn.Module,
    blocks: Sequence[str],
    bounds: Sequence[int],
    *,
    skeleton: Skeleton | None = None,
) -> StageCut:
    """Owners of all parameters for stages of the blocks bounds[s]:bounds[s + 1].

    `skeleton` is a copy to find them with; made here where it is None. Raises ModelError where the
    blocks are not one chain, or where the model is known not to be right when it is cut there.
    """
    container = block_list(model, blocks)
    flow = _flow_on_tokens(model, blocks, skeleton)
    first_names = {name: group[0] for group in tied_names(model) for name in group}
    needed = (
        stages_needed(flow, bounds, name=type(model).__name__)
        if flow is not None
        else StagesNeeded({}, {})
    )
    stages = len(bounds) - 1
    stage_of = {name: stage_at(bounds, index) for index, name in enumerate(blocks)}
    first_stage = _first_stage_modules(model, blocks, flow, first_names)
    owners: dict[str, frozenset[int]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        block = next((b for b in blocks if name.startswith(f"{b}.")), None)
        used = needed.owners.get(first_names.get(name, name), frozenset())
        if block is not None:
            owners[name] = frozenset({stage_of[block]})
            if name not in first_names and not used <= owners[name]:
                raise ModelError(
                    f"parallel.pp: {name} is used by stages {_listed(str(stage) for stage in used)}"
                    f" and its block is on stage {stage_of[block]}; a parameter that several blocks"
                    " use is registered in each of them, or outside of the blocks"
                )
        else:
            owners[name] = used or frozenset({0 if name in first_stage else stages - 1})
    for group in tied_names(model):
        together = frozenset().union(
            *(owners[name] for name in group), needed.owners.get(group[0], frozenset())
        )
        owners.update(dict.fromkeys(group, together))
    recomputed = {
        name: needed.recomputed.get(first_names.get(name, name), frozenset()) for name in owners
    }
    for name in first_stage:
        # A table that is looked up again later must not be passed over on the stage that does so.
        ran = flow.ran.get(name.rpartition(".")[0], set()) if flow is not None else set()
        recomputed[name] |= {stage_at(bounds, at) for at in ran} - {0}
    return StageCut(
        container,
        tuple(blocks),
        tuple(bounds),
        owners,
        first_stage,
        first_names,
        {name: on for name, on in recomputed.items() if on},
        (
            {}
            if flow is None
            else {
                name: min(flow.uses[first])
                for name in owners
                if (first := first_names.get(name, name)) in flow.uses
            }
        ),
        writes=flow is None or flow.writes,
        returned=None if flow is None else flow.returned,
    )


@dataclass(frozen=True)
class StagesNeeded:
    """What the stages of a cut must have outside of the blocks, by the first name of every
    parameter.
    """

    owners: dict[str, frozenset[int]]
    recomputed: dict[str, frozenset[int]]


def stage_at(bounds: Sequence[int], position: int) -> int:
    """The stage that runs block `position`; what comes after the last block is on the last
    stage.
    """
    return min(bisect_right(bounds, position) - 1, len(bounds) - 2)


def stages_needed(flow: Dataflow, bounds: Sequence[int], *, name: str) -> StagesNeeded:
    """What follows from a forward of the model `name` for a cut. Raises ModelError where a stage
    would need what it cannot have.
    """
    check_order(flow, bounds, name)
    owners = {
        parameter: {stage_at(bounds, at) for at in used} for parameter, used in flow.uses.items()
    }
    recomputed: dict[str, set[int]] = {}
    for need in sorted(flow.needs, key=lambda need: (need.position, need.what, need.origin.since)):
        first = stage_at(bounds, need.position)
        for stage in range(first, len(bounds) - 1) if need.decision else (first,):
            begin = bounds[stage]
            if need.origin.since < begin:
                raise ModelError(_around(flow, need, stage, begin, name))
            if need.origin.random < begin and need.origin.parameters:
                raise ModelError(
                    f"parallel.pp: on stage {stage}, {need.what} of {name} follows from random"
                    f" numbers (dropout) that were drawn before {flow.blocks[begin]}, other than"
                    " through the chain of blocks, and each stage would draw its own; set that"
                    " dropout to 0, or use parallel.pp = 1"
                )
            for parameter, used_at in need.origin.parameters:
                owners.setdefault(parameter, set()).add(stage)
                if used_at < begin:
                    recomputed.setdefault(parameter, set()).add(stage)
    frozen = lambda found: {key: frozenset(value) for key, value in found.items()}  # noqa: E731
    return StagesNeeded(frozen(owners), frozen(recomputed))


def check_order(flow: Dataflow, bounds: Sequence[int], name: str) -> None:
    """Raise ModelError unless the blocks at the ends of stages run, once each and in order."""
    twice = sorted({flow.blocks[index] for index in flow.order if flow.order.count(index) > 1})
    missing = [flow.blocks[end - 1] for end in bounds[1:-1] if end - 1 not in flow.order]
    if twice:
        rule = (
            f"{len(twice)} of the {len(flow.blocks)} blocks run more than once in a forward"
            f" ({_listed(twice)})"
        )
    elif flow.order != sorted(flow.order):
        rule = (
            "the blocks run in another order than they are listed in"
            f" ({_listed([flow.blocks[index] for index in flow.order])})"
        )
    elif missing:
        rule = f"a stage ends with {missing[0]}, which does not run in a forward of this batch"
    else:
        return
    raise ModelError(
        f"parallel.pp > 1: {name}: {rule}, and stages are cut from blocks that run once each, one"
        " after the other; name such blocks in parallel.blocks, end stages elsewhere"
        " (parallel.pipeline.blocks_per_stage), or use parallel.pp = 1"
    )


def _around(flow: Dataflow, need: Need, stage: int, begin: int, name: str) -> str:
    since = int(need.origin.since)
    where = f"inside {flow.blocks[since]} or before it" if since < len(flow.blocks) else "before it"
    return (
        f"parallel.pp: on stage {stage}, which begins with {flow.blocks[begin]}, {need.what} of"
        f" {name} uses a value computed {where} and does not pass through the chain of blocks (a"
        " skip connection, a recorded value, or a decision about hidden states), so the model"
        " cannot be cut there; use parallel.pp = 1"
    )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def block_list(model: nn.Module, blocks: Sequence[str]) -> str:
    """The name of the one list that holds all blocks. Raises ModelError where there is none."""
    if not blocks:
        raise ModelError(
            f"parallel.pp > 1: {type(model).__name__} has no list of equal blocks to cut into"
            " stages; name them in parallel.blocks"
        )
    parents = {block.rpartition(".")[0] for block in blocks}
    if len(parents) > 1:
        raise ModelError(
            f"parallel.pp > 1: the blocks are in {len(parents)} lists"
            f" ({', '.join(sorted(parents)[:3])}), and stages are cut from one; name the blocks of"
            " one list in parallel.blocks"
        )
    (parent,) = parents
    held = [
        f"{parent}.{child}" if parent else child
        for child, _ in model.get_submodule(parent).named_children()
    ]
    if list(blocks) != held:
        raise ModelError(
            f"parallel.pp > 1: {parent or 'the model'} holds {len(held)} modules and {len(blocks)}"
            " of them are blocks; stages are cut from whole lists: name all of them in"
            " parallel.blocks"
        )
    return parent


def _flow_on_tokens(
    model: nn.Module, blocks: Sequence[str], skeleton: Skeleton | None
) -> Dataflow | None:
    """What the model does with token ids; None for one that takes something else (then the first
    micro-batch tells, see `parallel.pipeline.cut_check`).
    """
    given = _tokens(model)
    if given is None:
        return None
    args, kwargs = given

    def run(copied: nn.Module, trace: Trace) -> None:
        # What follows from the last block only; which of the others a loss reads is not known yet.
        for name, leaves in output_fields(copied(*args, **kwargs)).items():
            if leaves and all(trace.origin(leaf).since == len(blocks) for leaf in leaves):
                trace.need(leaves, f"the output `{name}`")

    try:
        flow = (skeleton or Skeleton.of(model, blocks)).trace(run, training=model.training).flow
    except Untraceable:
        return None
    return flow if flow.order else None


def _tokens(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments that are token ids for a model that may take them."""
    ids = torch.zeros(1, 4, dtype=torch.int64)
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return None
    required = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if "input_ids" in parameters or hasattr(model, "config"):
        return (), {"input_ids": ids}
    embeds = any(isinstance(module, nn.Embedding) for module in model.modules())
    return ((ids,), {}) if embeds and len(required) == 1 else None


def _first_stage_modules(
    model: nn.Module, blocks: Sequence[str], flow: Dataflow | None, first_names: Mapping[str, str]
) -> frozenset[str]:
    """Parameters outside of the blocks that are used before the first block.

    What the traced forward did not use: from Transformers' pipeline plan where the model has one;
    else by the order of registration. Used on another stage than its own such a parameter is an
    error, so this cannot go wrong unseen.
    """
    rest = [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if not any(name.startswith(f"{b}.") for b in blocks)
    ]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    start = next(
        (index for index, name in enumerate(names) if name.startswith(f"{blocks[0]}.")), len(names)
    )
    planned = _first_stage_by_plan(model, blocks[0].rpartition(".")[0])

    def before(name: str) -> bool:
        first = first_names.get(name, name)
        if flow is not None and first in flow.uses:
            ran = flow.ran.get(name.rpartition(".")[0], set())
            # Of tied parameters the one counts whose module runs there.
            return (
                0 in (ran if first in first_names and ran else flow.uses[first])
                and first not in flow.inside
            )
        if planned is not None:
            return any(name == module or name.startswith(f"{module}.") for module in planned)
        return names.index(name) < start

    return frozenset(name for name in rest if before(name))


def _first_stage_by_plan(model: nn.Module, parent: str) -> list[str] | None:
    """Modules that Transformers' pp_plan names before the list of blocks."""
    prefix, _, leaf = parent.rpartition(".")
    plan: dict[str, Any] | None = getattr(model.get_submodule(prefix), "_pp_plan", None) or getattr(
        getattr(model, "config", None), "base_model_pp_plan", None
    )
    if not plan or leaf not in plan:
        return None
    before = list(plan)[: list(plan).index(leaf)]
    return [f"{prefix}.{name}" if prefix else name for name in before]
