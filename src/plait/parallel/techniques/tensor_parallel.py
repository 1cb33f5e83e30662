"""Tensor parallelism and sequence parallelism over the tp axis.

Linear layers are split by columns or by rows. The embedding and the head are split over the
vocabulary. A plan (`model.plans`) assigns a style to each module, and `tensor.styles` implements
the styles. This module applies a plan to a model.

Parameters keep their names and global shapes. Split parameters become DTensors over tp. Replicated
parameters stay plain tensors, with equal values and gradients on every rank of the axis.

Note [Marked outputs]
    Besides logits, a model may return hidden states of its blocks, which sequence parallelism
    shards, and attention weights, which each rank has only for its own heads. Both are plain
    tensors while the model runs. A mark on such a tensor records the dimension along which it is
    sharded. Marked tensors are gathered when the model returns them, so that a loss has the same
    value as in a single process.

Note [Traffic of tensor parallelism]
    With T tokens per micro-batch, w features, e bytes per element and n ranks, a collective moves
    T w e (n-1)/n, and an all-reduce twice that (ring). Per micro-batch (sp: sequence parallel):

    input of column-parallel siblings  backward all-reduce
                                       sp: forward all-gather, backward reduce-scatter
    row-parallel layer                 forward all-reduce
                                       sp: forward reduce-scatter, backward all-gather
    gathered output, sliced input      forward, backward all-gather
    vocabulary-parallel embedding      forward all-reduce
    loss over sharded logits           forward all-reduces of 3 T elements
    module computed on all tokens      sp: forward, backward all-gather

    The traffic grows with the activations and not with the parameters. The only exceptions are
    replicated weights that ranks use on different tokens or heads, because their gradients are
    all-reduced. T includes the tokens of all ranks of cp. Sequence lengths are assumed to be
    multiples of n and of the number of ranks of cp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from plait._torch.tensors import keep_uneven_gradients_split
from plait.cluster.layout import shard_size
from plait.cluster.mesh import Mesh
from plait.comm.collectives import gather, shard_range, split
from plait.errors import ModelError
from plait.model.facts import ModelFacts, ParameterFacts
from plait.model.layers import Style, tied_names
from plait.model.plans import StyledModule, TensorPlan, make_plan
from plait.model.sequence import is_inside
from plait.parallel.accounting.ledger import Array, Ledger
from plait.parallel.micro_batches import rebuild
from plait.parallel.parts import Parts, Plans
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.tensor import styles
from plait.parallel.tensor.hook_checks import refuse_hooks, watch
from plait.parallel.tensor.styles import SEQUENCE, Region, RegionInput


class TensorParallel(Technique):
    """Settings of tensor parallelism over the tp axis, whose degree the layout defines."""

    sequence_parallel: bool = False
    """True to shard norms and the residual stream along the sequence.

    All-reduces become reduce-scatters and all-gathers.
    """
    loss_parallel: bool = True
    """True to leave the logits split over the vocabulary for a loss that supports it.

    With such a loss, training never builds the full logits.
    """
    tensor_overlap: int = 0
    """Number of chunks of a row-parallel product. 0: all-reduces do not overlap.

    The all-reduce of a chunk overlaps with the product of the next chunk. The all-reduce of input
    gradients overlaps with the computation of weight gradients.
    """
    plan: Mapping[str, str] | None = None
    """Styles by module pattern, or None for the plan of the model family."""

    def check(self, context: TechniqueContext) -> Plans | None:
        """Check that the model can be split, and return the plan of tensor parallelism.

        Returns:
            The plan, or None if tp is 1 or the context has no model.

        Raises:
            ModelError: The model cannot be split this way.
            ConfigError: A setting is not supported.
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

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Split the parameters in place, and replace the forwards of the modules in the plan."""
        if mesh.layout.tp == 1:
            return parts
        # A dry run has no checks, and therefore no plan yet.
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
            gathers = any(
                is_inside(entry.name, parts.blocks)
                for entry in plan.modules
                if entry.style in ("colwise_gather_output", "rowwise_split_input")
            )
            # Such a block also computes on all tokens, where ranks must draw the same numbers.
            if plan.all_token_modules or gathers:
                region.random_scope = "nothing"
            _shard_sequence(parts.model, plan, region, parts.blocks)
        _leave_random_streams(parts.model, region, parts.blocks)
        _gather_outputs(parts.model, plan, region, parts.blocks)
        # Last, because it wraps the forwards that were set above.
        watch(parts.model, plan, blocks=parts.blocks, sequence_parallel=self.sequence_parallel)
        return replace(parts, region=region, plans=replace(parts.plans, tensor=plan))

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Record which dimensions are split, and add the traffic over the tp axis."""
        if facts.tensor_plan is None:
            return ledger
        ledger = ledger.with_(
            tensor_dims=facts.tensor_plan.dims, sequence_parallel=self.sequence_parallel
        )
        sent = _traffic(
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
    """Replace every split parameter with a DTensor that has this rank's shard.

    Tied parameters stay tied.
    """
    keep_uneven_gradients_split()
    group = mesh.get_group()
    tied = tied_names(model)
    tied_parameters = {name for names in tied for name in names}
    untied = [(name,) for name, _ in model.named_parameters() if name not in tied_parameters]
    for names in (*tied, *untied):
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


def _set_forwards(
    model: nn.Module, plan: TensorPlan, region: Region, blocks: tuple[str, ...]
) -> None:
    containers: Sequence[str] = ()
    unsharded: Sequence[str] = ()
    if region.sequence_parallel:
        containers = plan.regions
        unsharded = plan.all_token_modules
    for name in containers:
        styles.gather_at(model.get_submodule(name), region)
    for name in unsharded:
        styles.compute_on_all_tokens(model.get_submodule(name), region)

    region_inputs: dict[str, RegionInput] = {}
    for index, entry in enumerate(plan.modules):
        module = model.get_submodule(entry.name)
        sequence = (
            region.sequence_parallel
            and is_inside(entry.name, blocks)
            and not is_inside(entry.name, unsharded)
        )
        parent = entry.name.rpartition(".")[0]
        is_gathered = is_inside(entry.name, containers)
        region_input = region_inputs.setdefault(
            parent, RegionInput(region, sequence=sequence, is_gathered=is_gathered, uses=0)
        )
        if entry.style in ("colwise", "colwise_gather_output", "kv_replicated"):
            region_input.uses += 1
        begins_part = entry.style in ("colwise", "kv_replicated") and _row_parallel_follows(
            index, plan, blocks
        )
        module.forward = _forward(
            module, entry, plan, region, region_input, sequence=sequence, begins_part=begins_part
        )
    for name, attribute, value in plan.attributes:
        setattr(model.get_submodule(name), attribute, value)


def _row_parallel_follows(index: int, plan: TensorPlan, blocks: tuple[str, ...]) -> bool:
    """Return True if layer `index` of the plan precedes a row-parallel layer of the same block."""
    name = plan.modules[index].name
    block = next((f"{block}." for block in blocks if name.startswith(f"{block}.")), "")
    return any(
        other.style == "rowwise" and other.name.startswith(block)
        for other in plan.modules[index + 1 :]
    )


def _forward(
    module: nn.Module,
    entry: StyledModule,
    plan: TensorPlan,
    region: Region,
    region_input: RegionInput,
    *,
    sequence: bool,
    begins_part: bool,
) -> styles.Forward:
    match entry.style:
        case "colwise":
            return styles.colwise(module, region, region_input, begins_part=begins_part)
        case "colwise_gather_output":
            return styles.colwise_gather_output(module, region, region_input)
        case "kv_replicated":
            return styles.kv_replicated(
                module,
                region,
                region_input,
                heads=plan.kv_heads[entry.name],
                begins_part=begins_part,
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

    In a model without a final norm, the sharded part ends with the last block. The rest of the
    model sees full sequences, so that the positions, masks and shapes that it derives are right.
    """
    for name in (*plan.norms, *plan.adapters):
        module = model.get_submodule(name)
        module.forward = styles.summed_gradient(module, region)

    def shard(hidden: torch.Tensor) -> torch.Tensor:
        region.length = hidden.shape[SEQUENCE]
        part = split(hidden, region.group, dim=SEQUENCE)
        _mark_output(part, dim=SEQUENCE, length=region.length)
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
                f"parallel.sequence_parallel = true: {plan.final_norm or blocks[-1]} returns a"
                f" {type(output).__name__}, but it must return hidden states, alone or as the first"
                " entry of a tuple; use false"
            )
        return gather(output, region.group, dim=SEQUENCE, length=region.length)

    def enter_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and region.random_scope == "blocks":
            region.stream.enter(args[0] if args else kwargs["hidden_states"])

    def leave_block(_module: nn.Module, _args: object, output: Any) -> None:
        hidden = output
        if isinstance(output, tuple | list):
            hidden = output[0]
        _mark_output(hidden, dim=SEQUENCE, length=region.length)

    for name in blocks:
        model.get_submodule(name).register_forward_pre_hook(enter_block, with_kwargs=True)
        model.get_submodule(name).register_forward_hook(leave_block)
    model.get_submodule(blocks[0]).register_forward_pre_hook(
        enter_first, with_kwargs=True, prepend=True
    )
    model.get_submodule(plan.final_norm or blocks[-1]).register_forward_hook(leave_last)


def _leave_random_streams(model: nn.Module, region: Region, blocks: tuple[str, ...]) -> None:
    """Make ranks resume the shared random stream after each block, even if the block fails."""

    def leave(_module: nn.Module, _args: object, _output: object) -> None:
        region.stream.leave()

    for module in (model, *(model.get_submodule(name) for name in blocks)):
        module.register_forward_hook(leave, always_call=True)


def _gather_outputs(
    model: nn.Module, plan: TensorPlan, region: Region, blocks: tuple[str, ...]
) -> None:
    for name, heads in plan.heads.items():
        _mark_heads(model.get_submodule(name), heads=heads, group=region.group)
    # The modules that own the lists of blocks return to the code around them, and the root returns
    # to the user.
    owners = {name.rpartition(".")[0].rpartition(".")[0]: None for name in blocks} | {"": None}
    for name in owners:
        gather_outputs(model.get_submodule(name), region.group)


_MARK = "_plait_part"


def _mark_output(tensor: Any, *, dim: int, length: int) -> None:
    """Mark a tensor as this rank's part of a larger tensor. A value of another type is ignored.

    See Note [Marked outputs].

    Args:
        tensor: The part.
        dim: The dimension that is split.
        length: The length of the larger tensor along `dim`.
    """
    if isinstance(tensor, torch.Tensor):
        setattr(tensor, _MARK, (dim, length))


def _mark_heads(module: nn.Module, *, heads: int, group: ProcessGroup) -> None:
    """Mark the attention weights [batch, heads, queries, keys] that an attention module returns.

    Attention weights come after the first entry of the module's output.
    """
    local_heads = heads // group.size()

    def mark_weights(_module: nn.Module, _args: object, output: object) -> None:
        if not isinstance(output, tuple | list):
            return
        for value in output[1:]:
            if isinstance(value, torch.Tensor) and value.shape[1:2] == (local_heads,):
                _mark_output(value, dim=1, length=heads)

    module.register_forward_hook(mark_weights)


def gather_outputs(module: nn.Module, group: ProcessGroup) -> None:
    """Gather every marked tensor in the output of a module. See Note [Marked outputs].

    All ranks compute the same results from a gathered tensor. The gradient of a rank's part is
    therefore a slice of the gradient of the gathered tensor.
    """

    def gather_marked(_module: nn.Module, _args: object, output: Any) -> Any:
        gathered = _gather_parts(output, group)
        if gathered is output:
            # None leaves the output of the module as it is.
            return None
        return gathered

    module.register_forward_hook(gather_marked)


def _gather_parts(value: Any, group: ProcessGroup) -> Any:
    """Return a nested output with all parts gathered, or the same object if it has no parts."""
    if isinstance(value, torch.Tensor):
        part = getattr(value, _MARK, None)
        if part is None:
            return value
        dim, length = part
        return gather(value, group, dim=dim, length=length)
    if isinstance(value, tuple | list):
        gathered = [_gather_parts(entry, group) for entry in value]
        if all(new is old for new, old in zip(gathered, value, strict=True)):
            return value
        # A named tuple.
        if hasattr(value, "_fields"):
            return type(value)(*gathered)
        return type(value)(gathered)
    if isinstance(value, Mapping):
        for key, entry in list(value.items()):
            new = _gather_parts(entry, group)
            if new is not entry:
                # A ModelOutput or a dict.
                value[key] = new  # type: ignore[index]
        return value
    if not isinstance(value, nn.Module) and hasattr(value, "__dict__"):
        _gather_attributes(value, group)
    return value


def _gather_attributes(value: Any, group: ProcessGroup) -> None:
    for name, attribute in list(vars(value).items()):
        if not isinstance(attribute, torch.Tensor | tuple | list):
            continue
        new = _gather_parts(attribute, group)
        if new is not attribute:
            # The object may be a frozen dataclass.
            object.__setattr__(value, name, new)


def _traffic(
    facts: ModelFacts,
    plan: TensorPlan,
    ledger: Ledger,
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> dict[str, Array]:
    """Return the bytes that one rank sends per optimizer step, by collective.

    See Note [Traffic of tensor parallelism].

    Args:
        facts: The parameters of the model.
        plan: The plan of tensor parallelism.
        ledger: The candidates.
        sequence_parallel: Whether hidden states are sharded along the sequence.
        loss_parallel: Whether the loss takes sharded logits.
    """
    features, gathered = _features(
        facts, plan, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
    )
    parameters = _summed_numel(facts, plan, sequence_parallel=sequence_parallel)
    itemsize: Any = facts.parameters[0].itemsize
    if ledger.compute_bytes is not None:
        itemsize = ledger.compute_bytes
    loss_itemsize = np.maximum(itemsize, 4)
    n = ledger.tp
    tokens = ledger.tokens // ledger.cp

    # Collectives need equal parts, so features are padded.
    gathered_features = sum(shard_size(width, n) * n for width in gathered)
    if sequence_parallel:
        # The backward of the first block's input and the forward of the last one's output gather
        # all tokens, and so do modules that are computed on all tokens.
        hidden = next(
            p.shape[-1]
            for p in facts.parameters
            if p.unit >= 0 and p.name.rpartition(".")[0] in plan.norms
        )
        ends = 2 * np.ones_like(n)
        if ledger.stage is not None:
            ends = ledger.stage.ends
        gathered_features = gathered_features + hidden * (ends + 2 * len(plan.all_token_modules))

    token_bytes = tokens * itemsize
    all_reduced = (
        features["all_reduce"] * token_bytes
        + parameters * itemsize
        + features["loss"] * tokens * loss_itemsize
    )
    counts = {
        "all_reduce": 2 * all_reduced,
        "all_gather": (features["all_gather"] + gathered_features) * token_bytes,
        "reduce_scatter": features["reduce_scatter"] * token_bytes,
    }
    return {
        collective: ledger.accumulation * count * (n - 1) // n
        for collective, count in counts.items()
    }


def _features(
    facts: ModelFacts, plan: TensorPlan, *, sequence_parallel: bool, loss_parallel: bool
) -> tuple[Counter[str], list[int]]:
    """Return the widths of the activations that collectives send per token.

    Returns:
        (features per token by collective, widths of activations that are gathered along their
        features). The float32 elements of the loss have the key `loss`.
    """
    parameter_of = _parameters_by_name(facts)
    moved: Counter[str] = Counter()
    gathered: list[int] = []

    def move(features: int, *, sequence: bool) -> None:
        if sequence:
            moved["all_gather"] += features
            moved["reduce_scatter"] += features
        else:
            moved["all_reduce"] += features

    region_inputs: set[str] = set()
    for entry in plan.modules:
        weight = parameter_of[f"{entry.name}.weight"]
        inputs, outputs = _widths(weight, entry.style, plan.dims[weight.name])
        sequence = sequence_parallel and _is_sequence_sharded(entry, facts, plan)
        if entry.style in ("colwise", "colwise_gather_output", "kv_replicated", "vocab_head"):
            input_name = _region_input_name(entry, plan, sequence=sequence)
            if input_name not in region_inputs:
                region_inputs.add(input_name)
                move(inputs, sequence=sequence)
        if entry.style == "colwise_gather_output":
            gathered.append(outputs)
        if entry.style == "vocab_head" and loss_parallel:
            moved["loss"] += 3
        elif entry.style == "vocab_head":
            gathered.append(outputs)
        if entry.style in ("rowwise", "rowwise_split_input"):
            move(outputs, sequence=sequence)
        if entry.style == "rowwise_split_input":
            gathered.append(inputs)
        if entry.style == "embedding_rowwise":
            moved["all_reduce"] += weight.shape[1]
    return moved, gathered


def _summed_numel(facts: ModelFacts, plan: TensorPlan, *, sequence_parallel: bool) -> int:
    """Return the elements of replicated parameters whose gradients are summed over tp."""
    # Number of times that the gradients of a module's parameters, or of a bias, are summed.
    sums: Counter[str] = Counter()
    for entry in plan.modules:
        # Ranks see different heads in such a module.
        if entry.style in ("replicated_with_grad_allreduce", "kv_replicated"):
            sums[entry.name] += 1
    if sequence_parallel:
        # Ranks see different tokens in norms, and in the biases of row-parallel layers. The
        # replicated matrices of adapters see those or the gradients of different columns.
        sums.update({*plan.norms, *plan.adapters})
        for entry in plan.modules:
            is_row_parallel = entry.style in ("rowwise", "rowwise_split_input")
            if is_row_parallel and _is_sequence_sharded(entry, facts, plan):
                sums[f"{entry.name}.bias"] += 1

    total = 0
    for name, parameter in _parameters_by_name(facts).items():
        module = name.rpartition(".")[0]
        total += parameter.numel * (sums[module] + sums[name])
    return total


def _parameters_by_name(facts: ModelFacts) -> dict[str, ParameterFacts]:
    return {name: p for p in facts.parameters for name in (p.name, *p.also)}


def _is_sequence_sharded(entry: StyledModule, facts: ModelFacts, plan: TensorPlan) -> bool:
    return is_inside(entry.name, facts.blocks) and not is_inside(entry.name, plan.all_token_modules)


def _region_input_name(entry: StyledModule, plan: TensorPlan, *, sequence: bool) -> str:
    """Return the name of the input that a column-parallel layer shares with its siblings."""
    if entry.style == "vocab_head":
        return entry.name
    if sequence:
        for container in plan.regions:
            if entry.name.startswith(f"{container}."):
                return container
    return entry.name.rpartition(".")[0]


def _widths(weight: ParameterFacts, style: Style, split_dim: int | None) -> tuple[int, int]:
    """Return the (input, output) features of a layer."""
    if len(weight.shape) < 2:
        return weight.shape[0], weight.shape[0]
    # Transformers' Conv1D stores [in, out], which the dimension that the style splits reveals.
    if style.startswith(("colwise", "vocab")):
        is_transposed = split_dim == 1
    else:
        is_transposed = split_dim == 0
    if is_transposed:
        return weight.shape[0], weight.shape[1]
    return weight.shape[1], weight.shape[0]
