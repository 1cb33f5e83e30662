"""Tensor parallelism and sequence parallelism over the tp axis.

Layers are split by columns and rows, and the embedding and the head over the vocabulary. A plan
(`model.plans`) says which module gets which style, and `styles` says what a style does. This module
applies a plan to a model.

Parameters keep their names and global shapes. Split ones become DTensors over tp. Replicated ones
stay plain, with equal values and gradients on every rank of the axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from plait.model.plans import StyledModule, TensorPlan, make_plan
from plait.model.sequence import is_inside
from plait.model.tied import tied_names
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.containers import rebuild
from plait.parallel.parts import Parts, Plans
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.tensor import outputs, styles
from plait.parallel.tensor.hook_checks import refuse_hooks, watch
from plait.parallel.tensor.styles import SEQUENCE, Region, RegionInput
from plait.parallel.tensor.traffic import tensor_traffic


class TensorParallel(Technique):
    """Tensor parallelism. Its degree is that of the layout."""

    sequence_parallel: bool = False
    """True to shard norms and the residual stream along the sequence.

    All-reduces become reduce-scatters and all-gathers.
    """
    loss_parallel: bool = True
    """True to leave the logits split over the vocabulary for a loss that supports it.

    Training never builds the full logits then.
    """
    tensor_overlap: int = 0
    """Chunks in which a row-parallel product is computed. 0: all-reduces do not overlap.

    The all-reduce of a chunk overlaps with the product of the next one, and that of input gradients
    with the gradients of weights.
    """
    plan: Mapping[str, str] | None = None
    """Style by module pattern, or None for the plan of the model family."""

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Split the parameters in place, and replace the forwards of the modules in the plan."""
        if mesh.layout.tp == 1:
            return parts
        # A dry run, which checks nothing, makes the plan here.
        plan = parts.plans.tensor or self._plan(parts.model, parts.blocks, tp=mesh.layout.tp)
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
            region.random_scope = "blocks"
            # Such a block also computes on all tokens, where ranks must draw the same numbers.
            if plan.whole or _gathers_inside(plan, parts.blocks):
                region.random_scope = "nothing"
            _shard_sequence(parts.model, plan, region, parts.blocks)
        _end_parts(parts.model, region, parts.blocks)
        _gather_outputs(parts.model, plan, region, parts.blocks)
        # Last, because it wraps the forwards that were set above.
        watch(parts.model, plan, blocks=parts.blocks, sequence_parallel=self.sequence_parallel)
        return replace(parts, region=region, plans=replace(parts.plans, tensor=plan))

    def check(self, context: TechniqueContext) -> Plans | None:
        """Check that the model can be split, and return the plan of tensor parallelism.

        Returns:
            The plan of the splits, or None if there is no model or a single rank of tp.

        Raises:
            ModelError: The model cannot be split this way.
            ConfigError: A setting is impossible.
        """
        if context.model is None or context.layout.tp == 1:
            return None
        return Plans(tensor=self._plan(context.model, context.blocks, tp=context.layout.tp))

    def _plan(self, model: nn.Module, blocks: tuple[str, ...], *, tp: int) -> TensorPlan:
        plan = make_plan(model, tp=tp, user=self.plan, blocks=blocks)
        if self.sequence_parallel and plan.sequence_parallel is not True:
            raise ModelError(
                f"parallel.sequence_parallel = true: {plan.sequence_parallel}; use false"
            )
        refuse_hooks(model, plan, blocks=blocks, sequence_parallel=self.sequence_parallel)
        return plan

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Set the dimensions that are split, and add the traffic over the tp axis."""
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
    """Replace every split parameter by a DTensor with this rank's shard.

    Tied parameters stay tied.
    """
    keep_uneven_gradients_split()
    group = mesh.get_group()
    for names in (*tied_names(model), *_untied_names(model)):
        first = names[0]
        dim = plan.dims[first]
        if dim is None:
            continue
        parameter = model.get_parameter(first)
        start, size = shard_range(parameter.shape[dim], group)
        with torch.no_grad():
            shard = parameter.detach().narrow(dim, start, size)
            local = shard.clone(memory_format=torch.contiguous_format)
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
        for name in names:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, sharded)


def _untied_names(model: nn.Module) -> list[tuple[str, ...]]:
    tied = {name for names in tied_names(model) for name in names}
    return [(name,) for name, _ in model.named_parameters() if name not in tied]


def _set_forwards(
    model: nn.Module, plan: TensorPlan, region: Region, blocks: tuple[str, ...]
) -> None:
    containers: Sequence[str] = ()
    unsharded: Sequence[str] = ()
    if region.sequence_parallel:
        containers = plan.regions
        unsharded = plan.whole
    for name in containers:
        styles.gather_at(model.get_submodule(name), region)
    for name in unsharded:
        styles.compute_whole(model.get_submodule(name), region)

    region_inputs: dict[str, RegionInput] = {}
    for index, entry in enumerate(plan.modules):
        module = model.get_submodule(entry.name)
        sequence = (
            region.sequence_parallel
            and is_inside(entry.name, blocks)
            and not is_inside(entry.name, unsharded)
        )
        parent = entry.name.rpartition(".")[0]
        opened = is_inside(entry.name, containers)
        region_input = region_inputs.setdefault(
            parent, RegionInput(region, sequence=sequence, opened=opened, uses=0)
        )
        if entry.style in ("colwise", "colwise_gather_output", "kv_replicated"):
            region_input.uses += 1
        begins = entry.style in ("colwise", "kv_replicated") and _ends_behind(index, plan, blocks)
        module.forward = _forward(
            module, entry, plan, region, region_input, sequence=sequence, begins=begins
        )
    for name, attribute, value in plan.attributes:
        setattr(model.get_submodule(name), attribute, value)


def _ends_behind(index: int, plan: TensorPlan, blocks: tuple[str, ...]) -> bool:
    """Return True if a row-parallel layer follows this column-parallel one in its block."""
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
    entry: StyledModule,
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
    """Shard hidden states along the sequence, from the first block to the final norm.

    Without a final norm the last block is the end. Outside, the model sees full sequences, so that
    the positions, masks and shapes that it derives from them are right.
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
        # The hidden states come first. OpenAI's GPT returns lists.
        if isinstance(output, tuple | list):
            entries = dict(enumerate(output))
            entries[0] = leave_last(_module, _args, output[0])
            return rebuild(output, entries)
        if not isinstance(output, torch.Tensor):
            raise ModelError(
                f"{plan.final_norm or blocks[-1]} returns a {type(output).__name__}; with"
                " parallel.sequence_parallel = true it has to return hidden states, alone or as"
                " the first of a tuple; set parallel.sequence_parallel = false"
            )
        return gather(output, region.group, dim=SEQUENCE, length=region.length)

    def enter_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and region.random_scope == "blocks":
            hidden = args[0] if args else kwargs["hidden_states"]
            region.stream.enter(hidden)

    def leave_block(_module: nn.Module, _args: object, output: Any) -> None:
        hidden = output
        if isinstance(output, tuple | list):
            hidden = output[0]
        outputs.mark(hidden, dim=SEQUENCE, length=region.length)

    for name in blocks:
        model.get_submodule(name).register_forward_pre_hook(enter_block, with_kwargs=True)
        model.get_submodule(name).register_forward_hook(leave_block)
    model.get_submodule(blocks[0]).register_forward_pre_hook(
        enter_first, with_kwargs=True, prepend=True
    )
    model.get_submodule(plan.final_norm or blocks[-1]).register_forward_hook(leave_last)


def _end_parts(model: nn.Module, region: Region, blocks: tuple[str, ...]) -> None:
    """Return to the shared random numbers after each block, even if it failed."""

    def leave(_module: nn.Module, _args: object, _output: object) -> None:
        region.stream.leave()

    for module in (model, *(model.get_submodule(name) for name in blocks)):
        module.register_forward_hook(leave, always_call=True)


def _gather_outputs(
    model: nn.Module, plan: TensorPlan, region: Region, blocks: tuple[str, ...]
) -> None:
    for name, heads in plan.heads.items():
        outputs.mark_heads(model.get_submodule(name), heads=heads, group=region.group)
    # The modules that own the lists of blocks return to the code around them, and the root returns
    # to the user.
    owners = {name.rpartition(".")[0].rpartition(".")[0]: None for name in blocks} | {"": None}
    for name in owners:
        outputs.gather_outputs(model.get_submodule(name), region.group)
