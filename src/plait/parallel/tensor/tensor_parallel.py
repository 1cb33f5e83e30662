"""Tensor parallelism over the tp axis: layers split by columns and rows, vocabulary-parallel
embedding and head, and sequence parallelism.

Which module gets which style is data (`model.plans`); what a style does is in `styles`; here they
meet. Parameters keep their names and global shapes: split ones become DTensors over tp, replicated
ones stay plain and have equal values and gradients on every rank of the axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from plait._torch.dtensor import keep_uneven_gradients_split
from plait.cluster.mesh import Mesh
from plait.comm.collectives import gather, shard_range, split
from plait.errors import ModelError
from plait.model.facts import ModelFacts
from plait.model.plans import Sharded, TensorPlan, make_plan
from plait.model.sequence import is_inside
from plait.model.tied import tied_names
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.containers import rebuilt
from plait.parallel.technique import Context, Parts, Technique
from plait.parallel.tensor import outputs, styles
from plait.parallel.tensor.hook_checks import refuse_hooks, watch
from plait.parallel.tensor.styles import SEQUENCE, Region, RegionInput
from plait.parallel.tensor.traffic import tensor_traffic


class TensorParallel(Technique):
    """How layers are split over the tp axis; its degree is the layout's."""

    sequence_parallel: bool = False
    """Shard norms and the residual stream along the sequence: reduce-scatter and all-gather in
    place of all-reduce.
    """
    loss_parallel: bool = True
    """Leave the logits split over the vocabulary for a loss that can use them so; full logits are
    then never built in training.
    """
    tensor_overlap: int = 0
    """Chunks in which a row-parallel product is computed; the all-reduce of each overlaps with the
    product of the next, and that of input gradients with the gradients of weights. 0: sums are
    waited for.
    """
    plan: Mapping[str, str] | None = None
    """Module pattern to style; None takes the model family's own plan."""

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Split in place."""
        if mesh.layout.tp == 1:
            return parts
        # A dry run, which checks nothing, makes the plan here.
        plan = parts.noted(TensorPlan) or self._plan(parts.model, parts.blocks, tp=mesh.layout.tp)
        group = mesh.group("tp")
        assert group is not None
        region = Region(
            group,
            mesh.sub("tp"),
            sequence_parallel=self.sequence_parallel,
            overlap=self.tensor_overlap,
            loss_parallel=self.loss_parallel,
        )
        _split_parameters(parts.model, plan, region.mesh)
        _set_forwards(parts.model, plan, region, parts.blocks)
        if self.sequence_parallel:
            region.own_random = (
                "nothing" if plan.whole or _gathers_inside(plan, parts.blocks) else "blocks"
            )
            _shard_sequence(parts.model, plan, region, parts.blocks)
        _end_parts(parts.model, region, parts.blocks)
        _gather_what_is_returned(parts.model, plan, region, parts.blocks)
        watch(parts.model, plan, blocks=parts.blocks, sequence_parallel=self.sequence_parallel)
        return parts.with_notes(region, plan)

    def check(self, context: Context) -> TensorPlan | None:
        """The plan; None for one rank. Raises ModelError or ConfigError where the model cannot be
        split so.
        """
        if context.model is None or context.layout.tp == 1:
            return None
        return self._plan(context.model, context.blocks, tp=context.layout.tp)

    def _plan(self, model: nn.Module, blocks: tuple[str, ...], *, tp: int) -> TensorPlan:
        plan = make_plan(model, tp=tp, user=self.plan, blocks=blocks)
        if self.sequence_parallel and plan.sequence_parallel is not True:
            raise ModelError(
                f"parallel.sequence_parallel = true: {plan.sequence_parallel}; use false"
            )
        refuse_hooks(model, plan, blocks=blocks, sequence_parallel=self.sequence_parallel)
        return plan

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Split dimensions for the technique that shards what remains, and the traffic of
        activations over the tp axis.
        """
        if facts.tensor_plan is None:
            return ledger
        ledger = ledger.with_(
            tensor_dims=facts.tensor_plan.dims, sequence_parallel=self.sequence_parallel
        )
        sent = tensor_traffic(
            facts,
            facts.tensor_plan,
            ledger,
            sequence_parallel=self.sequence_parallel,
            loss_parallel=self.loss_parallel,
        )
        for collective, count in sent.items():
            ledger = ledger.add_traffic(collective, count)
        return ledger


def _split_parameters(model: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Replace every split parameter by a DTensor that holds this rank's shard. Tied parameters stay
    one.
    """
    keep_uneven_gradients_split()
    group = mesh.get_group()
    for first, *others in (*tied_names(model), *((name,) for name in _untied(model))):
        dim = plan.dims[first]
        if dim is None:
            continue
        parameter = model.get_parameter(first)
        start, size = shard_range(parameter.shape[dim], group)
        with torch.no_grad():
            local = (
                parameter.detach()
                .narrow(dim, start, size)
                .clone(memory_format=torch.contiguous_format)
            )
        sharded = nn.Parameter(
            DTensor.from_local(
                local,
                mesh,
                [Shard(dim)],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ),
            requires_grad=parameter.requires_grad,
        )
        for name in (first, *others):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, sharded)


def _untied(model: nn.Module) -> list[str]:
    tied = {name for group in tied_names(model) for name in group}
    return [name for name, _ in model.named_parameters() if name not in tied]


def _set_forwards(
    model: nn.Module, plan: TensorPlan, region: Region, blocks: tuple[str, ...]
) -> None:
    containers = plan.regions if region.sequence_parallel else ()
    for name in containers:
        styles.gather_at(model.get_submodule(name), region)
    whole = plan.whole if region.sequence_parallel else ()
    for name in whole:
        styles.compute_whole(model.get_submodule(name), region)
    region_inputs: dict[str, RegionInput] = {}
    for index, entry in enumerate(plan.modules):
        module = model.get_submodule(entry.name)
        in_block = (
            region.sequence_parallel
            and is_inside(entry.name, blocks)
            and not is_inside(entry.name, whole)
        )
        parent = entry.name.rpartition(".")[0]
        opened = is_inside(entry.name, containers)
        region_input = region_inputs.setdefault(
            parent, RegionInput(region, sequence=in_block, opened=opened, uses=0)
        )
        if entry.style in ("colwise", "colwise_gather_output", "kv_replicated"):
            region_input.uses += 1
        begins = entry.style in ("colwise", "kv_replicated") and _ends_behind(index, plan, blocks)
        module.forward = _forward(
            module, entry, plan, region, region_input, sequence=in_block, begins=begins
        )
    for name, attribute, value in plan.attributes:
        setattr(model.get_submodule(name), attribute, value)


def _ends_behind(index: int, plan: TensorPlan, blocks: tuple[str, ...]) -> bool:
    """Whether a row-split layer stands behind this column-split one, in its block."""
    name = plan.modules[index].name
    block = next((f"{block}." for block in blocks if name.startswith(f"{block}.")), "")
    return any(
        other.style == "rowwise" and other.name.startswith(block)
        for other in plan.modules[index + 1 :]
    )


def _gathers_inside(plan: TensorPlan, blocks: tuple[str, ...]) -> bool:
    gathered = [
        entry.name
        for entry in plan.modules
        if entry.style in ("colwise_gather_output", "rowwise_split_input")
    ]
    return any(is_inside(name, blocks) for name in gathered)


def _forward(
    module: nn.Module,
    entry: Sharded,
    plan: TensorPlan,
    region: Region,
    region_input: RegionInput,
    *,
    sequence: bool,
    begins: bool,
) -> styles.Forward:
    match entry.style:
        case "colwise":
            return styles.colwise(module, region, region_input, begins=begins)
        case "colwise_gather_output":
            return styles.colwise_gather_output(module, region, region_input)
        case "kv_replicated":
            return styles.kv_replicated(
                module, region, region_input, heads=plan.kv_heads[entry.name], begins=begins
            )
        case "rowwise" | "rowwise_split_input":
            return styles.rowwise(
                module, region, split_input=entry.style == "rowwise_split_input", sequence=sequence
            )
        case "embedding_rowwise":
            assert isinstance(module, nn.Embedding)
            return styles.embedding_rowwise(module, region)
        case "vocab_head":
            return styles.vocab_head(module, region, RegionInput(region))
        case "replicated_with_grad_allreduce":
            return styles.summed_gradient(module, region)


def _shard_sequence(
    model: nn.Module, plan: TensorPlan, region: Region, blocks: tuple[str, ...]
) -> None:
    """Hidden states are sharded along the sequence from the input of the first block to the end of
    the final norm (of the last block, without one). Outside, the model sees full sequences, so
    positions, masks and shapes that it derives from them are right.
    """
    for name in plan.norms:
        module = model.get_submodule(name)
        module.forward = styles.summed_gradient(module, region)

    def shard(hidden: torch.Tensor) -> torch.Tensor:
        region.length = hidden.shape[SEQUENCE]
        part = split(hidden, region.group, dim=SEQUENCE)
        outputs.mark(part, dim=SEQUENCE, length=region.length)
        return part

    def enter_first(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return styles.on_hidden(shard, args, kwargs)

    def leave_last(_module: nn.Module, _args: object, output: object) -> object:
        if isinstance(output, tuple | list):  # OpenAI's GPT returns lists
            return rebuilt(
                output, {**dict(enumerate(output)), 0: leave_last(_module, _args, output[0])}
            )
        if not isinstance(output, torch.Tensor):
            raise ModelError(
                f"{plan.final_norm or blocks[-1]} returns a {type(output).__name__}; with"
                " parallel.sequence_parallel = true it has to return hidden states, alone or as"
                " the first of a tuple; set parallel.sequence_parallel = false"
            )
        return gather(output, region.group, dim=SEQUENCE, length=region.length)

    def enter_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and region.own_random == "blocks":
            region.stream.enter(args[0] if args else kwargs["hidden_states"])

    def leave_block(_module: nn.Module, _args: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple | list) else output
        outputs.mark(hidden, dim=SEQUENCE, length=region.length)

    for name in blocks:
        model.get_submodule(name).register_forward_pre_hook(enter_block, with_kwargs=True)
        model.get_submodule(name).register_forward_hook(leave_block)
    model.get_submodule(blocks[0]).register_forward_pre_hook(
        enter_first, with_kwargs=True, prepend=True
    )
    model.get_submodule(plan.final_norm or blocks[-1]).register_forward_hook(leave_last)


def _end_parts(model: nn.Module, region: Region, blocks: tuple[str, ...]) -> None:
    """Whatever a block did, also where it failed: after it all ranks draw the same numbers."""

    def leave(_module: nn.Module, _args: object, _output: object) -> None:
        region.stream.leave()

    for module in (model, *(model.get_submodule(name) for name in blocks)):
        module.register_forward_hook(leave, always_call=True)


def _gather_what_is_returned(
    model: nn.Module, plan: TensorPlan, region: Region, blocks: tuple[str, ...]
) -> None:
    for name, heads in plan.heads.items():
        outputs.mark_heads(model.get_submodule(name), heads=heads, group=region.group)
    owners = {name.rpartition(".")[0].rpartition(".")[0]: None for name in blocks} | {"": None}
    for name in owners:  # what a part of the model returns is read by the code around it
        outputs.gather_outputs(model.get_submodule(name), region.group)
