"""Expert parallelism: each rank of the ep axis has some of the experts of every layer.

Tokens are sent to the ranks of the experts that they are routed to. The axis is a second view of
the ranks of a pipeline stage. Neighbouring ranks have different experts, whether they have other
samples, other parts of sequences, or (tp) the same tokens, of which each then sends a part.
Parameters that are not experts are split, replicated or sharded by the first view as before.

The gradient of an expert is complete except for the ranks of `edp`, which have the same experts. It
is summed over them, or from ZeRO stage 1 on reduced in shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from plait.cluster.layout import STAGE_AXES
from plait.cluster.mesh import Groups, Mesh
from plait.errors import ConfigError, ModelError, Problem, raise_problems
from plait.model.experts import SPLIT_FAMILIES, Experts, find_experts
from plait.model.facts import ModelFacts
from plait.model.sequence import is_inside
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.experts import dispatch
from plait.parallel.experts.traffic import expert_traffic
from plait.parallel.gradient_sums import sum_gradients
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.compression import Compression
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.optimizer_offload import OptimizerOffload
from plait.parallel.techniques.parameter_offload import ParameterOffload
from plait.parallel.techniques.recompute import Recompute

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""Implementations of experts in Transformers that work with the experts of one rank."""


class ExpertParallel(Technique):
    """Expert parallelism. Its degree is that of the layout."""

    def check(self, context: TechniqueContext) -> None:
        """Refuse models and settings that are not computed as in one process, or not tested to be.

        Raises:
            ConfigError: A setting is not supported.
            ModelError: The model is not supported.
        """
        ep = context.layout.ep
        if ep == 1:
            return
        raise_problems(
            Problem("parallel.ep", ep, rule, f"{remedy}, or use 1")
            for applies, rule, remedy in _rules(context)
            if applies
        )
        if context.model is not None:
            _refuse_unsupported_model(context.model, ep)
            _refuse_unproven(context.model, tp=context.layout.tp)

    def groups(self, context: TechniqueContext) -> Groups:
        """Return the group of all ranks that may use different experts of a layer."""
        if context.layout.ep > 1:
            return Groups(axes=(STAGE_AXES,))
        return Groups()

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Keep the experts of this rank, and install the dispatch of tokens."""
        group = mesh.group("ep")
        if group is None or mesh.expert_mesh is None:
            return parts
        layers = find_experts(parts.model)
        region = parts.region
        plan = parts.plans.tensor
        # Modules whose output is a shard of the sequence.
        sequence_sharded: Sequence[str] = ()
        if plan is not None and region is not None and region.sequence_parallel:
            sequence_sharded = plan.whole
        for experts in layers:
            module = parts.model.get_submodule(experts.name)
            for name in experts.parameters:
                leaf = name.rpartition(".")[2]
                setattr(module, leaf, _local_experts(module.get_parameter(leaf), mesh))
            dispatch.install(
                module,
                group,
                experts_per_rank=experts.count // mesh.layout.ep,
                tp=mesh.group("tp"),
                sequence=region if is_inside(experts.name, sequence_sharded) else None,
            )
        separate_mesh = {experts.name: mesh.expert_mesh["edp"] for experts in layers}
        return replace(parts.with_shard(separate_mesh=separate_mesh), experts=layers)

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hook that sums gradients over ranks with the same experts."""
        if not parts.experts:
            return []
        names = [name for experts in parts.experts for name in experts.parameters]
        parameters = [p for p in map(parts.model.get_parameter, names) if p.requires_grad]
        if isinstance(parts.model, FSDPModule):
            # `fully_shard` reduces them.
            parameters = []
        return [
            ExpertGradients(
                parts.model,
                parts.experts,
                parameters,
                same=mesh.group("edp"),
                everyone=mesh.group(*STAGE_AXES),
            )
        ]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Mark the parameters of experts, and add the traffic of tokens."""
        if (ledger.ep == 1).all() or facts.experts is None:
            return ledger
        ledger = ledger.with_(experts=frozenset(facts.experts.parameters))
        for collective, count in expert_traffic(facts, ledger).items():
            ledger = ledger.add_traffic(collective, count)
        return ledger


def _rules(context: TechniqueContext) -> tuple[tuple[bool, str, str], ...]:
    """Return the refused settings as (applies, rule, remedy)."""
    layout = context.layout
    data = context.chosen(DataParallel)
    precision = context.chosen(Precision)
    offloads = {context.chosen(OptimizerOffload).device, context.chosen(ParameterOffload).device}
    compression = context.chosen(Compression)
    return (
        (
            data.stage == 0 and precision.compute is not None,
            (
                f"ZeRO stage 0 computes in {precision.compute} by torch's sharding, which has no"
                " replicas of experts"
            ),
            "set zero_optimization.stage = 1",
        ),
        (precision.loss_scale is not None, "fp16 with its loss scale is not proven", "use bf16"),
        (
            data.update_in_backward,
            "parallel.optimizer_in_backward is not proven",
            "set that to false",
        ),
        (
            data.secondary_partition > 0,
            "parallel.secondary_partition is not proven",
            "set that to 0",
        ),
        (
            compression.gradients or compression.scheme.weight_bits > 0,
            "compressed messages are not proven",
            "leave the compression out",
        ),
        (context.chosen(Compile).enabled, "compile.enabled is not proven", "set that to false"),
        (
            offloads != {"none"} and layout.dp_shard == 1,
            "offloaded states are those of shards, and parallel.dp_shard is 1",
            'set that to 2 or more, or use device "none"',
        ),
        (
            context.chosen(Recompute).mode == "budget",
            "parallel.recompute.budget_gib counts what every process keeps for all experts",
            'use the mode "full" or "selective"',
        ),
    )


def _refuse_unsupported_model(model: nn.Module, ep: int) -> None:
    layers = find_experts(model)
    name = type(model).__name__
    if not layers:
        raise ModelError(
            f"parallel.ep = {ep}: {name} has no experts that are supported (modules of Transformers"
            " with one parameter for all experts, stacked along its first dimension); use 1"
        )
    for experts in layers:
        if experts.count % ep:
            divisors = [d for d in range(1, experts.count + 1) if experts.count % d == 0]
            rule = (
                f"{experts.name} has {experts.count} experts, of which every process has as many,"
                f" and {experts.count} % {ep} = {experts.count % ep}"
            )
            remedy = f"use a divisor: {', '.join(map(str, divisors))}"
            raise ConfigError(Problem("parallel.ep", ep, rule, remedy))

    expert_names = {name for experts in layers for name in experts.parameters}
    first_names: dict[int, str] = {}
    for second, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), second)
        if first != second and {first, second} & expert_names:
            raise ModelError(
                f"parallel.ep = {ep}: {first} and {second} are one parameter, and experts are"
                " split; use 1"
            )
    kind = getattr(getattr(model, "config", None), "_experts_implementation", "eager")
    if kind not in IMPLEMENTATIONS:
        raise ModelError(
            f"parallel.ep = {ep}: {name} computes experts with {kind!r}, which is not proven to"
            " take some of them; call model.set_experts_implementation with one of"
            f" {', '.join(IMPLEMENTATIONS)}"
        )


def _refuse_unproven(model: nn.Module, *, tp: int) -> None:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if tp > 1 and kind not in SPLIT_FAMILIES:
        raise ModelError(
            f"parallel.ep with parallel.tp = {tp}: {type(model).__name__} (model_type {kind!r}) is"
            " not among the models for which splitting other layers together with experts is"
            f" tested: {', '.join(SPLIT_FAMILIES)}; use parallel.tp = 1"
        )


def _local_experts(parameter: nn.Parameter, mesh: Mesh) -> nn.Parameter:
    """Return this rank's experts of a parameter, as a DTensor of its global shape."""
    assert mesh.expert_mesh is not None
    count = parameter.shape[0] // mesh.layout.ep
    with torch.no_grad():
        # [experts, ...] -> [experts / ep, ...]
        experts = parameter.detach().narrow(0, mesh.coordinates["ep"] * count, count)
        local = experts.clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(
        local,
        mesh.expert_mesh["ep"],
        [Shard(0)],
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty_like(parameter, device="meta").stride(),
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


class ExpertGradients(StepHook):
    """Sums the gradients of experts over the ranks that have the same ones."""

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[Experts, ...],
        parameters: Sequence[nn.Parameter],
        *,
        same: dist.ProcessGroup | None,
        everyone: dist.ProcessGroup | None,
    ) -> None:
        """Create the hook.

        Args:
            model: The model on this rank.
            layers: Its layers of experts.
            parameters: Trainable parameters of experts. Empty if `fully_shard` reduces them.
            same: The ranks with the same experts.
            everyone: All ranks of the pipeline stage.
        """
        self.model = model
        self.layers = layers
        self.parameters = parameters
        self.same = same
        self.everyone = everyone
        counts = {experts.count for experts in layers}
        self.said = (
            f"experts ({', '.join(map(str, sorted(counts)))} a layer) are split over ranks, and"
            " tokens are sent to them"
        )

    def finish_reduction(self) -> None:
        """Sum the gradients of experts. Collective.

        A parameter that no rank used keeps no gradient. If any rank used some experts of a layer,
        all ranks get a gradient, as in one process.
        """
        sum_gradients(self.parameters, self.same, users=self.everyone)

    def release(self) -> None:
        """Restore the original forward of the modules."""
        for experts in self.layers:
            dispatch.remove(self.model.get_submodule(experts.name), count=experts.count)
