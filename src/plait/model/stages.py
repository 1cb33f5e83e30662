"""Description of a model's pipeline stages, and placeholders for values of other stages.

Note [Owners of parameters]
    The blocks must be one chain in one list: each takes the output of the previous one. A stage
    owns its blocks. The other parameters are assigned by a run of the model without its weights
    (see `dataflow`):

    - Parameters used before the first block (embeddings) belong to the first stage.
    - Parameters used after the last block (final norm, head) belong to the last stage.
    - Parameters that blocks of several stages read (a table of positions, an embedding that later
      blocks read again) belong to each of these stages. Their gradients are summed.

The model itself is not changed.

`UnavailableTensor` is the placeholder for a value that does not exist on this process. It has a
shape and a dtype, and any other use of it raises an error. None in its place would hide mistakes:
torch silently computes a normalisation without a weight, and a model's own code takes another
branch.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.model.blocks import block_index
from plait.model.dataflow import Dataflow, ForwardTrace, Need, Skeleton, Untraceable
from plait.model.layers import first_names, tied_names
from plait.model.sequence import is_inside
from plait.names import listed_names


@dataclass(frozen=True)
class StageCut:
    """Stages of a model and the parameters that they own."""

    container: str
    """Name of the list that holds the blocks; empty if the model itself is the list."""
    blocks: tuple[str, ...]
    bounds: tuple[int, ...]
    """Bounds of the stages. Stage s owns the blocks from bounds[s] up to bounds[s + 1]."""
    owners: dict[str, frozenset[int]]
    """Stages that use each parameter. All names of a tied parameter have the same stages."""
    first_stage: frozenset[str]
    """Names of the parameters that are used before the first block."""
    first_names: dict[str, str] = field(default_factory=dict)
    """First name of each tied parameter, which may not exist on a later stage."""
    recomputed: dict[str, frozenset[int]] = field(default_factory=dict)
    """Later stages that recompute values from a parameter, by parameter name.

    The parameter is used before the blocks of these stages, which need values that follow from it.
    """
    lowest: dict[str, int] = field(default_factory=dict)
    """First block before which, or inside which, a parameter is used, if it is known."""
    writes: bool = True
    """True if code outside the blocks may change values in place."""
    returned: Any = field(default=None, compare=False, repr=False)
    """Output of a block for a few tokens, with its tensors on meta; None if it is not known."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def first_use(self, name: str) -> int:
        """Return where in the chain of blocks a parameter outside the blocks is first used.

        The result is the index of the block that uses it, or of the next block to run. It is the
        number of blocks for a parameter that is used after the last block.
        """
        return self.lowest.get(name, 0 if name in self.first_stage else len(self.blocks))

    def outside_stages(self) -> frozenset[int]:
        """Return the stages that use parameters outside the blocks.

        The first and the last stage are always included.
        """
        outside = {0, self.stages - 1}
        for name, stages in self.owners.items():
            if not is_inside(name, self.blocks):
                outside |= stages
        return frozenset(outside)

    def shared(self) -> dict[str, frozenset[int]]:
        """Return the stages of every parameter that several stages use, by parameter name."""
        return {name: stages for name, stages in self.owners.items() if len(stages) > 1}


def cut_model(
    model: nn.Module,
    blocks: Sequence[str],
    bounds: Sequence[int],
    *,
    skeleton: Skeleton | None = None,
) -> StageCut:
    """Cut a model into stages. See Note [Owners of parameters].

    Args:
        model: The model, on any device.
        blocks: Names of its repeated blocks.
        bounds: Stage s gets the blocks bounds[s]:bounds[s + 1].
        skeleton: Copy of the model without weights. It is created if it is None.

    Raises:
        ModelError: The blocks are not one chain, or the stages would compute wrong values.
    """
    container = block_list(model, blocks)
    flow = _flow_on_tokens(model, blocks, skeleton)
    names = first_names(model)
    needed = StagesNeeded({}, {})
    if flow is not None:
        needed = stages_needed(flow, bounds, name=type(model).__name__)
    first_stage = _first_stage_parameters(model, blocks, flow, names)
    owners = _owners(model, blocks, bounds, needed, first_stage)

    recomputed = {}
    for name in owners:
        recomputed[name] = needed.recomputed.get(names.get(name, name), frozenset())
    lowest = {}
    if flow is not None:
        for name in first_stage:
            # The module of a table that is looked up again must run on the later stage as well.
            ran = flow.ran.get(name.rpartition(".")[0], set())
            recomputed[name] |= {stage_of_block(bounds, position) for position in ran} - {0}
        for name in owners:
            first_name = names.get(name, name)
            if first_name in flow.uses:
                lowest[name] = min(flow.uses[first_name])
    return StageCut(
        container,
        tuple(blocks),
        tuple(bounds),
        owners,
        first_stage,
        names,
        {name: stages for name, stages in recomputed.items() if stages},
        lowest,
        writes=flow is None or flow.writes,
        returned=None if flow is None else flow.returned,
    )


def _owners(
    model: nn.Module,
    blocks: Sequence[str],
    bounds: Sequence[int],
    needed: StagesNeeded,
    first_stage: frozenset[str],
) -> dict[str, frozenset[int]]:
    """Return the stages that own each parameter. See Note [Owners of parameters]."""
    names = first_names(model)
    last = len(bounds) - 2
    owners: dict[str, frozenset[int]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        used = needed.owners.get(names.get(name, name), frozenset())
        block = block_index(name, blocks)
        if block < 0:
            owners[name] = used or frozenset({0 if name in first_stage else last})
            continue
        stage = stage_of_block(bounds, block)
        owners[name] = frozenset({stage})
        if name not in names and not used <= owners[name]:
            raise ModelError(
                f"parallel.pp: {name} is used by stages {listed_names(sorted(map(str, used)), 3)}"
                f" and its block is on stage {stage}; register a parameter that several blocks use"
                " in each of these blocks, or outside the blocks"
            )

    for group in tied_names(model):
        stages = needed.owners.get(group[0], frozenset())
        for name in group:
            stages |= owners[name]
        owners.update(dict.fromkeys(group, stages))
    return owners


@dataclass(frozen=True)
class StagesNeeded:
    """Stages that need parameters, by the first name of each parameter."""

    owners: dict[str, frozenset[int]]
    """Stages that use the parameter."""
    recomputed: dict[str, frozenset[int]]
    """Stages that use the parameter at a position before their first block."""


def stage_of_block(bounds: Sequence[int], position: int) -> int:
    """Return the stage that runs block `position`.

    Code after the last block runs on the last stage.
    """
    return min(bisect_right(bounds, position) - 1, len(bounds) - 2)


def stages_needed(flow: Dataflow, bounds: Sequence[int], *, name: str) -> StagesNeeded:
    """Return the stages that need each parameter.

    Args:
        flow: Record of a forward of the model.
        bounds: Bounds of the stages, see `StageCut`.
        name: Class name of the model, for messages.

    Raises:
        ModelError: A stage needs a value that it cannot compute.
    """
    check_order(flow, bounds, name)
    owners = {}
    for parameter, positions in flow.uses.items():
        owners[parameter] = {stage_of_block(bounds, position) for position in positions}

    recomputed: dict[str, set[int]] = {}
    for need in sorted(flow.needs, key=lambda need: (need.position, need.what, need.origin.since)):
        first = stage_of_block(bounds, need.position)
        # A decision outside the blocks is made on all later stages.
        stages = range(first, len(bounds) - 1) if need.decision else (first,)
        for stage in stages:
            begin = bounds[stage]
            _check_need(flow, need, stage, begin, name)
            for parameter, position in need.origin.parameters:
                owners.setdefault(parameter, set()).add(stage)
                if position < begin:
                    recomputed.setdefault(parameter, set()).add(stage)
    return StagesNeeded(_freeze(owners), _freeze(recomputed))


def _check_need(flow: Dataflow, need: Need, stage: int, begin: int, name: str) -> None:
    """Raise ModelError if a stage that begins with block `begin` cannot compute a value."""
    if need.origin.since < begin:
        since = int(need.origin.since)
        where = "before it"
        if since < len(flow.blocks):
            where = f"inside {flow.blocks[since]} or before it"
        raise ModelError(
            f"parallel.pp: on stage {stage}, which begins with {flow.blocks[begin]}, {need.what} of"
            f" {name} uses a value computed {where} that does not pass through the chain of blocks"
            " (a skip connection, a recorded value, or a decision about hidden states), so the"
            " model cannot be cut there; use parallel.pp = 1"
        )
    if need.origin.random < begin and need.origin.parameters:
        raise ModelError(
            f"parallel.pp: on stage {stage}, {need.what} of {name} depends on random numbers"
            f" (dropout) that were drawn before {flow.blocks[begin]} and do not pass through the"
            " chain of blocks, so each stage would draw different ones; set that dropout to 0, or"
            " use parallel.pp = 1"
        )


def _freeze(stages: Mapping[str, set[int]]) -> dict[str, frozenset[int]]:
    return {name: frozenset(numbers) for name, numbers in stages.items()}


def check_order(flow: Dataflow, bounds: Sequence[int], name: str) -> None:
    """Check that the last block of every stage runs, and that blocks run once and in order.

    Args:
        flow: Record of a forward of the model.
        bounds: Bounds of the stages, see `StageCut`.
        name: Class name of the model, for messages.

    Raises:
        ModelError: The last block of a stage does not run, or blocks run repeatedly or out of
            order.
    """
    repeated = sorted({flow.blocks[index] for index in flow.order if flow.order.count(index) > 1})
    # The last stage may end with blocks that do not run.
    missing = [flow.blocks[end - 1] for end in bounds[1:-1] if end - 1 not in flow.order]
    if repeated:
        rule = (
            f"{len(repeated)} of the {len(flow.blocks)} blocks run more than once in a forward"
            f" ({listed_names(sorted(repeated), 3)})"
        )
    elif flow.order != sorted(flow.order):
        rule = (
            "the blocks run in another order than they are listed in"
            f" ({listed_names(sorted(flow.blocks[index] for index in flow.order), 3)})"
        )
    elif missing:
        rule = f"a stage ends with {missing[0]}, which does not run in a forward of this batch"
    else:
        return
    raise ModelError(
        f"parallel.pp > 1: {name}: {rule}, but stages are cut from blocks that run once each, one"
        " after the other; name such blocks in parallel.blocks, end stages elsewhere"
        " (parallel.pipeline.blocks_per_stage), or use parallel.pp = 1"
    )


def block_list(model: nn.Module, blocks: Sequence[str]) -> str:
    """Return the name of the list that holds all blocks.

    Raises:
        ModelError: There are no blocks, they are in several lists, or the list holds other modules.
    """
    if not blocks:
        raise ModelError(
            f"parallel.pp > 1: {type(model).__name__} has no list of repeated blocks that could"
            " be divided into stages; name the blocks of one list in parallel.blocks, or use"
            " parallel.pp = 1"
        )
    parents = {block.rpartition(".")[0] for block in blocks}
    if len(parents) > 1:
        raise ModelError(
            f"parallel.pp > 1: the blocks are in {len(parents)} lists"
            f" ({', '.join(sorted(parents)[:3])}), but stages are cut from one; name the blocks of"
            " one list in parallel.blocks"
        )
    (parent,) = parents
    children = []
    for leaf, _ in model.get_submodule(parent).named_children():
        children.append(f"{parent}.{leaf}".removeprefix("."))
    if list(blocks) != children:
        raise ModelError(
            f"parallel.pp > 1: {parent or 'the model'} holds {len(children)} modules and"
            f" {len(blocks)} of them are blocks; only a list of blocks can be split into stages:"
            " name all of its modules in parallel.blocks"
        )
    return parent


def _flow_on_tokens(
    model: nn.Module, blocks: Sequence[str], skeleton: Skeleton | None
) -> Dataflow | None:
    """Record a forward of the model on token ids.

    The result is None for a model with other inputs. Then the first micro-batch is traced instead,
    see `parallel.pipeline.cut_check`.
    """
    arguments = _token_arguments(model)
    if arguments is None:
        return None
    args, kwargs = arguments

    def run(copied: nn.Module, trace: ForwardTrace) -> None:
        # Only outputs that follow from the last block alone are certainly needed on the last stage.
        # It is not known yet which of the others a loss reads.
        for name, leaves in output_fields(copied(*args, **kwargs)).items():
            if leaves and all(trace.origin(leaf).since == len(blocks) for leaf in leaves):
                trace.need(leaves, f"the output `{name}`")

    try:
        if skeleton is None:
            skeleton = Skeleton.of(model, blocks)
        flow = skeleton.trace(run, training=model.training).flow
    except Untraceable:
        return None
    return flow if flow.order else None


def _token_arguments(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments of a forward with token ids, or None if the model accepts none."""
    ids = torch.zeros(1, 4, dtype=torch.int64)
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return None
    if "input_ids" in parameters or hasattr(model, "config"):
        return (), {"input_ids": ids}

    required = []
    for p in parameters.values():
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            required.append(p)
    has_embedding = any(isinstance(module, nn.Embedding) for module in model.modules())
    if has_embedding and len(required) == 1:
        return (ids,), {}
    return None


def _first_stage_parameters(
    model: nn.Module, blocks: Sequence[str], flow: Dataflow | None, first_names: Mapping[str, str]
) -> frozenset[str]:
    """Return the parameters outside the blocks that are used before the first block.

    Parameters that the traced forward did not use are assigned by Transformers' pipeline plan if
    the model has one, and otherwise by the order of registration. This cannot fail silently: using
    a parameter on a stage that does not own it is an error.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    in_first_block = [index for index, name in enumerate(names) if is_inside(name, blocks[:1])]
    start = in_first_block[0] if in_first_block else len(names)
    planned = _modules_before_blocks(model, blocks[0].rpartition(".")[0])

    first_stage = set()
    for index, name in enumerate(names):
        first_name = first_names.get(name, name)
        if is_inside(name, blocks):
            continue
        if flow is not None and first_name in flow.uses:
            # All names of a tied parameter share the entry in `uses`. The name whose module runs
            # before the first block is the one that counts.
            positions = flow.uses[first_name]
            if first_name in first_names:
                positions = flow.ran.get(name.rpartition(".")[0]) or positions
            is_first = 0 in positions and first_name not in flow.inside
        elif planned is not None:
            is_first = name in planned or is_inside(name, planned)
        else:
            is_first = index < start
        if is_first:
            first_stage.add(name)
    return frozenset(first_stage)


def _modules_before_blocks(model: nn.Module, parent: str) -> list[str] | None:
    """Return the modules that Transformers' `_pp_plan` names before the list of blocks."""
    prefix, _, leaf = parent.rpartition(".")
    plan: dict[str, Any] | None = getattr(model.get_submodule(prefix), "_pp_plan", None) or getattr(
        getattr(model, "config", None), "base_model_pp_plan", None
    )
    if not plan or leaf not in plan:
        return None
    modules = list(plan)[: list(plan).index(leaf)]
    return [f"{prefix}.{name}".removeprefix(".") for name in modules]


_AVAILABLE_ATTRIBUTES = frozenset(
    {"shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_floating_point", "size"}
    | {"dim", "numel"}
)


class UnavailableTensor:
    """Placeholder for a tensor of another pipeline stage.

    Args:
        why: Complete message of the error that any use raises.
        like: Tensor with the shape, dtype and device of the missing one.
    """

    def __init__(self, why: str, like: torch.Tensor | None = None) -> None:
        self._why = why
        self._like: torch.Tensor | None = None
        if like is not None:
            # The placeholder takes no memory.
            self._like = torch.empty_like(like, device="meta", requires_grad=False)
            self._device = like.device

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for optional methods.
        if name.startswith("__"):
            raise AttributeError(name)
        if self._like is None or name not in _AVAILABLE_ATTRIBUTES:
            raise ModelError(self._why)
        return self._device if name == "device" else getattr(self._like, name)

    # A placeholder has no state that a copy could change.
    def __deepcopy__(self, memo: dict[int, Any]) -> UnavailableTensor:
        return self

    def __repr__(self) -> str:
        return f"<unavailable: {self._why}>"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in _leaves((args, kwargs or {})):
            if isinstance(value, UnavailableTensor):
                raise ModelError(value._why)
        raise ModelError(
            "a tensor of another pipeline stage is used; this is a bug in Plait: report it with the"
            " traceback"
        )


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "mod"),
    *("pow", "matmul", "rmatmul", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne", "bool", "len"),
    *("iter", "getitem", "setitem", "contains", "float", "int", "index"),
)


def _raising_method(name: str) -> Callable[..., Any]:
    def method(self: UnavailableTensor, *_: Any) -> Any:
        raise ModelError(self._why)

    method.__name__ = name
    return method


# Python looks up operators on the class, so `__getattr__` does not see them.
for _name in _OPERATORS:
    setattr(UnavailableTensor, f"__{_name}__", _raising_method(f"__{_name}__"))
# Setting __eq__ keeps the hash of `object`; a set of values may contain a placeholder.
UnavailableTensor.__hash__ = object.__hash__  # type: ignore[method-assign]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for entry in value:
            yield from _leaves(entry)
    else:
        yield value


def output_fields(output: Any) -> dict[str | int, list[torch.Tensor]]:
    """Return the tensors in each entry of a model's output.

    Args:
        output: A tensor, mapping, tuple, list, or object with attributes.

    Returns:
        Lists of tensors by key, attribute or index.
    """
    fields = {}
    for name, value in _entries(output):
        fields[name] = [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]
    return fields


def _entries(output: Any) -> list[tuple[str | int, Any]]:
    if isinstance(output, torch.Tensor):
        return [(0, output)]
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, tuple | list):
        names = getattr(output, "_fields", None) or range(len(output))
        return list(zip(names, output, strict=True))
    if is_dataclass(output) or hasattr(output, "__dict__"):
        return list(vars(output).items())
    return []


def with_unavailable_entries(output: Any, why: Mapping[str | int, str]) -> Any:
    """Replace entries of a model's output with placeholders.

    Args:
        output: See `output_fields`. It is changed in place if its type permits.
        why: Complete message of the error, by key, attribute or index of the entry.

    Returns:
        The changed output.
    """
    if not why:
        return output
    if isinstance(output, torch.Tensor):
        return UnavailableTensor(next(iter(why.values())))
    if isinstance(output, tuple):
        entries = [
            UnavailableTensor(why[name]) if name in why else value
            for name, value in _entries(output)
        ]
        # The constructor of a named tuple takes one argument per entry.
        return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)

    for name, reason in why.items():
        if isinstance(output, dict | list):
            output[name] = UnavailableTensor(reason)  # type: ignore[index]
        # Transformers' outputs have every entry under its key and as an attribute.
        if isinstance(name, str) and hasattr(output, name):
            object.__setattr__(output, name, UnavailableTensor(reason))
    return output
