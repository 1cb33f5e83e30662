"""Expert parallelism: each rank of the ep axis has some of the experts of every layer, and tokens
go to those that they are routed to.

The axis is a second view of the ranks of a pipeline stage: neighbouring ones have different
experts, whether they have other samples, other parts of sequences or (of tp) the same tokens, of
which each then sends a part. What is not an expert is split, replicated or sharded by the first
view as before. An expert's gradient is complete, but for the ranks of `edp`, which have the same
experts: there it is summed, or reduced in shards, from ZeRO stage 1 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from plait._torch.dtensor import local_tensor
from plait.cluster import accelerator
from plait.cluster.fake_group import is_fake
from plait.cluster.layout import STAGE_AXES
from plait.cluster.mesh import Groups, Mesh
from plait.errors import ConfigError, ModelError, Problem, refuse
from plait.model.experts import SPLIT_FAMILIES, Experts, find_experts
from plait.model.facts import ModelFacts
from plait.model.plans import TensorPlan
from plait.model.sequence import is_inside
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.activations.decisions import Deciding
from plait.parallel.activations.recompute import Recompute
from plait.parallel.compile import Compile
from plait.parallel.data.compression import Compression
from plait.parallel.data.data_parallel import DataParallel
from plait.parallel.experts import dispatch
from plait.parallel.experts.traffic import expert_traffic
from plait.parallel.hooks import StepHook
from plait.parallel.offload.optimizer_offload import OptimizerOffload
from plait.parallel.offload.parameter_offload import ParameterOffload
from plait.parallel.precision.mixed_precision import Precision
from plait.parallel.technique import Context, Parts, Technique
from plait.parallel.tensor.styles import Region

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""Transformers' ways to compute experts that take this rank's alone."""


class ExpertParallel(Technique):
    """How experts are split over ranks; the degree is the layout's."""

    def check(self, context: Context) -> None:
        """Raise ConfigError or ModelError for what is not computed as in one process, or not proven
        to be.
        """
        ep = context.layout.ep
        if ep == 1:
            return
        refuse(
            Problem("parallel.ep", ep, rule, f"{remedy}, or use 1")
            for applies, rule, remedy in _rules(context)
            if applies
        )
        if context.model is not None:
            _refuse_unfit(context.model, ep)
            _refuse_unproven(context.model, tp=context.layout.tp)

    def groups(self, context: Context) -> Groups:
        """All that may use different experts of one layer."""
        return Groups(axes=(STAGE_AXES,) if context.layout.ep > 1 else ())

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Keep this rank's experts."""
        group = mesh.group("ep")
        if group is None or mesh.expert_mesh is None:
            return parts
        found = find_experts(parts.model)
        region = parts.noted(Region)
        plan = parts.noted(TensorPlan)
        shards = (
            plan.whole
            if plan is not None and region is not None and region.sequence_parallel
            else ()
        )
        for experts in found:
            module = parts.model.get_submodule(experts.name)
            for name in experts.parameters:
                leaf = name.rpartition(".")[2]
                setattr(module, leaf, _part_of(module.get_parameter(leaf), mesh))
            sequence = region if is_inside(experts.name, shards) else None
            dispatch.install(
                module,
                group,
                here=experts.count // mesh.layout.ep,
                tp=mesh.group("tp"),
                sequence=sequence,
            )
        own_mesh = {experts.name: mesh.expert_mesh["edp"] for experts in found}
        return parts.with_shard(own_mesh=own_mesh).with_notes(SplitExperts(found), Deciding())

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Sum gradients over ranks that have the same experts."""
        split = parts.noted(SplitExperts)
        if split is None:
            return []
        names = [name for experts in split.found for name in experts.parameters]
        trained = [p for p in map(parts.model.get_parameter, names) if p.requires_grad]
        sharded = isinstance(parts.model, FSDPModule)
        summed = [] if sharded else trained
        return [
            ExpertGradients(
                parts.model, split, summed, same=mesh.group("edp"), everyone=mesh.group(*STAGE_AXES)
            )
        ]

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Which parameters are experts, for the technique that shards, and the traffic of tokens;
        nothing where ep is 1.
        """
        if (ledger.ep == 1).all() or facts.experts is None:
            return ledger
        ledger = ledger.with_(experts=frozenset(facts.experts.parameters))
        for collective, count in expert_traffic(facts, ledger).items():
            ledger = ledger.add_traffic(collective, count)
        return ledger


def _rules(context: Context) -> tuple[tuple[bool, str, str], ...]:
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


def _refuse_unfit(model: nn.Module, ep: int) -> None:
    found = find_experts(model)
    name = type(model).__name__
    if not found:
        raise ModelError(
            f"parallel.ep = {ep}: {name} has no experts that are known (modules of Transformers"
            " whose parameters count experts in their first dimension); use 1"
        )
    for experts in found:
        if experts.count % ep:
            divisors = ", ".join(
                str(degree) for degree in range(1, experts.count + 1) if experts.count % degree == 0
            )
            rule = (
                f"{experts.name} has {experts.count} experts, of which every process has as many,"
                f" and {experts.count} % {ep} = "
            )
            raise ConfigError(
                Problem(
                    "parallel.ep", ep, f"{rule}{experts.count % ep}", f"use a divisor: {divisors}"
                )
            )
    names = {name for experts in found for name in experts.parameters}
    owners: dict[int, str] = {}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        first = owners.setdefault(id(parameter), other)
        if first != other and {first, other} & names:
            raise ModelError(
                f"parallel.ep = {ep}: {first} and {other} are one parameter, and experts are split;"
                " use 1"
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
            " not among the models whose other layers are split beside experts and compared with"
            f" one process: {', '.join(SPLIT_FAMILIES)}; use parallel.tp = 1"
        )


def _part_of(parameter: nn.Parameter, mesh: Mesh) -> nn.Parameter:
    """This rank's experts of a parameter, as a DTensor of its global shape."""
    assert mesh.expert_mesh is not None
    here = parameter.shape[0] // mesh.layout.ep
    with torch.no_grad():
        local = (
            parameter.detach()
            .narrow(0, mesh.coordinates["ep"] * here, here)
            .clone(memory_format=torch.contiguous_format)
        )
    part = DTensor.from_local(
        local,
        mesh.expert_mesh["ep"],
        [Shard(0)],
        run_check=False,
        shape=parameter.shape,
        stride=torch.empty_like(parameter, device="meta").stride(),
    )
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


@dataclass(frozen=True)
class SplitExperts:
    """What `apply` has split."""

    found: tuple[Experts, ...]


class ExpertGradients(StepHook):
    """Sums of the gradients of experts over the ranks that have the same ones; nothing to sum where
    `fully_shard` does.
    """

    def __init__(
        self,
        model: nn.Module,
        split: SplitExperts,
        parameters: Sequence[nn.Parameter],
        *,
        same: dist.ProcessGroup | None,
        everyone: dist.ProcessGroup | None,
    ) -> None:
        """`same`: the ranks with the same experts. `everyone`: all of a stage."""
        self.model = model
        self.split = split
        self.parameters = parameters
        self.same = same
        self.everyone = everyone
        counts = {experts.count for experts in split.found}
        self.said = (
            f"experts ({', '.join(map(str, sorted(counts)))} a layer) are split over ranks, and"
            " tokens are sent to them"
        )

    def finish_reduction(self) -> None:
        """A parameter that no rank used keeps no gradient; where any used some of a layer's
        experts, all have one, as in one process.
        """
        if not self.parameters:
            return
        used = [p.grad is not None for p in self.parameters]
        flags = accelerator.tensor_of(
            used, dtype=torch.uint8, device=local_tensor(self.parameters[0].detach()).device
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.everyone)
        # Only a rank that missed one has to look, and wait for its device: where it used all, all
        # are used.
        wanted = [True] * len(used) if all(used) or is_fake() else flags.tolist()
        sums = []
        for parameter, use in zip(self.parameters, wanted, strict=True):
            if not use:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.same is not None:
                gradient = local_tensor(parameter.grad)
                sent = gradient.contiguous()  # grouped products leave it transposed
                sums.append((gradient, sent, dist.all_reduce(sent, group=self.same, async_op=True)))
        for gradient, sent, work in sums:
            if work is not None:
                work.wait()
            if sent is not gradient:
                gradient.copy_(sent)

    def release(self) -> None:
        """The modules' own forward."""
        for experts in self.split.found:
            dispatch.remove(self.model.get_submodule(experts.name), count=experts.count)
