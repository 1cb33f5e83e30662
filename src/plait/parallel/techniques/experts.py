"""Mixture of experts: expert parallelism, load balancing, and updates of routing biases.

With expert parallelism each rank of the ep axis has some of the experts of every layer, and tokens
are sent to the ranks of the experts that they are routed to. The axis belongs to a second mesh over
the ranks of a pipeline stage. Ranks of ep may have different samples (dp), different parts of
sequences (cp), or the same tokens (tp). In the last case each rank sends a part of the tokens. All
other parameters are split, replicated or sharded over the first mesh. The gradient of an expert is
summed over the `edp` axis, whose ranks have the same experts. From ZeRO stage 1 on, this sum is a
reduce-scatter.

A router may add a bias per expert to its scores when it selects experts. This balances experts
without a loss, as in DeepSeek-V3. After a step the bias is raised for experts with fewer tokens
than the mean, and lowered for experts with more. The classes of Transformers have the bias, but
never change it.

Note [Traffic of expert parallelism]
    With T tokens per micro-batch, k experts per token, h elements per token, e bytes per element, n
    ranks of ep and E experts, a layer sends per micro-batch, if all experts receive the same number
    of tokens:

    forward    8 E (n-1)/n bytes of counts, and twice T k h e (n-1)/n: the tokens, and the results
    backward   twice T k h e (n-1)/n: the gradients of both

    T is the number of tokens of a rank, after cp and tp have split them. Before and after such a
    layer, each of the m ranks of tp has all T m tokens. The all-gathers of the layer therefore send
    T m h e (m-1)/m bytes of results in the forward. In the backward they send T m h e (m-1)/m bytes
    of gradients of tokens, and T m k (m-1)/m gradients of routing weights, each of 4 bytes or more.
    With sequence parallelism each rank keeps the results and the gradients of its tokens, and only
    gradients of routing weights are gathered.

    The bytes of an all-to-all are counted under reduce-scatter, because Plait's reduce-scatter for
    gloo is an all-to-all (`comm.collectives`). Ranks whose experts receive more tokens send back
    more results. The sum over all ranks stays below n / (n-1) times the sum of these formulas.
    `Recompute.account` adds the collectives that recomputation repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from plait._torch.modules import direct_buffers
from plait._torch.passes import graph_task
from plait.cluster.layout import STAGE_AXES, Layout, shard_size
from plait.cluster.mesh import Groups, Mesh
from plait.errors import ConfigError, ModelError, Problem, raise_problems
from plait.model.experts import (
    SCORE_CORRECTION_BIAS,
    SPLIT_FAMILIES,
    Experts,
    biased_routers,
    chosen_experts,
    enables_balance_loss,
    find_experts,
    recorded_routers,
)
from plait.model.facts import ModelFacts
from plait.model.sequence import is_inside
from plait.parallel.accounting.ledger import Array, Ledger
from plait.parallel.data.reducer import sum_gradients
from plait.parallel.experts import dispatch
from plait.parallel.experts.adapted_parameters import install as install_adapters
from plait.parallel.experts.router_statistics import RouterStatistics
from plait.parallel.hooks import StepEnd, StepHook
from plait.parallel.micro_batches import TokenMaskObserver
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.data_collectives import Compression
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.offload import OptimizerOffload, ParameterOffload
from plait.parallel.techniques.recompute import Recompute
from plait.sizes import dtype_name

Balance = Literal["micro_batch", "global"]


class ExpertParallel(Technique):
    """Expert parallelism over the ep axis, whose degree the layout defines."""

    def check(self, context: TechniqueContext) -> None:
        """Refuse models and settings whose results may differ from those of one process.

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
            _refuse_unsupported_model(context.model, context.layout)

    def groups(self, context: TechniqueContext) -> Groups:
        """Return the mesh dimensions over which ranks agree on which experts were used."""
        if context.layout.ep > 1:
            return Groups(axes=(STAGE_AXES,))
        return Groups()

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Remove the experts of other ranks, and install the dispatch of tokens."""
        adapters = install_adapters(
            parts.model, rank=mesh.coordinates.get("ep", 0), ranks=mesh.layout.ep
        )
        parts = replace(parts, expert_adapters=adapters)
        group = mesh.group("ep")
        if group is None or mesh.expert_mesh is None:
            return parts
        layers = find_experts(parts.model)
        region = parts.region
        plan = parts.plans.tensor
        # Modules whose output is a shard of the sequence.
        sequence_sharded: Sequence[str] = ()
        if plan is not None and region is not None and region.sequence_parallel:
            sequence_sharded = plan.all_token_modules
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
        """Return the hooks that support adapters on experts and that sum gradients of experts."""
        hooks: list[StepHook] = []
        if parts.expert_adapters is not None:
            hooks.append(parts.expert_adapters)
        if not parts.experts:
            return hooks
        parameters = []
        # In a sharded model `fully_shard` reduces them.
        if not isinstance(parts.model, FSDPModule):
            names = [name for experts in parts.experts for name in experts.parameters]
            parameters = [p for p in map(parts.model.get_parameter, names) if p.requires_grad]
        hooks.append(
            ExpertGradients(
                parts.model,
                parts.experts,
                parameters,
                replica_group=mesh.group("edp"),
                stage_group=mesh.group(*STAGE_AXES),
            )
        )
        return hooks

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Record which parameters are experts, and add the traffic of tokens."""
        if (ledger.ep == 1).all() or facts.experts is None:
            return ledger
        ledger = ledger.with_(experts=frozenset(facts.experts.parameters))
        for collective, count in _traffic(facts, ledger).items():
            ledger = ledger.add_traffic(collective, count)
        return ledger


class ExpertGradients(StepHook):
    """Hook that sums the gradients of experts over the ranks that have the same experts."""

    def __init__(
        self,
        model: nn.Module,
        layers: tuple[Experts, ...],
        parameters: Sequence[nn.Parameter],
        *,
        replica_group: dist.ProcessGroup | None,
        stage_group: dist.ProcessGroup | None,
    ) -> None:
        """Create the hook.

        Args:
            model: The model on this rank.
            layers: Layers of experts in the model.
            parameters: Trainable parameters of experts. Empty if `fully_shard` reduces them.
            replica_group: The ranks with the same experts.
            stage_group: All ranks of the pipeline stage.
        """
        self.model = model
        self.layers = layers
        self.parameters = parameters
        self.replica_group = replica_group
        self.stage_group = stage_group
        counts = {experts.count for experts in layers}
        self.description = (
            f"experts ({', '.join(map(str, sorted(counts)))} per layer) are split over ranks, and"
            " tokens are sent to them"
        )

    def finish_reduction(self) -> None:
        """Sum the gradients of experts over the ranks that have the same experts. Collective.

        The gradient of a parameter that no rank used stays None. A parameter that some rank used
        gets a gradient on all ranks, as in one process.
        """
        sum_gradients(self.parameters, self.replica_group, users=self.stage_group)

    def release(self) -> None:
        """Restore the original forward of the modules."""
        for experts in self.layers:
            dispatch.remove(self.model.get_submodule(experts.name), count=experts.count)


def _rules(context: TechniqueContext) -> tuple[tuple[bool, str, str], ...]:
    """Return (is violated, rule, remedy) for each rule about settings used with ep."""
    layout = context.layout
    data = context.technique(DataParallel)
    precision = context.technique(Precision)
    offloads = {
        context.technique(OptimizerOffload).device,
        context.technique(ParameterOffload).device,
    }
    compression = context.technique(Compression)
    return (
        (
            data.stage == 0 and precision.compute is not None,
            (
                f"ZeRO stage 0 uses torch's sharding to compute in {precision.compute}, which does"
                " not support replicas of experts"
            ),
            "set zero_optimization.stage = 1",
        ),
        (precision.loss_scale is not None, "fp16 with its loss scale is not tested", "use bf16"),
        (
            data.update_in_backward,
            "parallel.optimizer_in_backward is not tested",
            "set parallel.optimizer_in_backward to false",
        ),
        (
            data.secondary_partition > 0,
            "parallel.secondary_partition is not tested",
            "set parallel.secondary_partition to 0",
        ),
        (
            compression.gradients or compression.scheme.weight_bits > 0,
            "compressed messages are not tested",
            "leave the compression out",
        ),
        (
            context.technique(Compile).enabled,
            "compile.enabled is not tested",
            "set compile.enabled to false",
        ),
        (
            offloads != {"none"} and layout.dp_shard == 1,
            "only states of shards are offloaded, and parallel.dp_shard is 1",
            'set parallel.dp_shard to 2 or more, or use device "none"',
        ),
        (
            context.technique(Recompute).mode == "budget",
            "parallel.recompute.budget_gib counts the activations of all experts on every rank",
            'use the mode "full" or "selective"',
        ),
    )


_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""Transformers' implementations of experts that also support a part of the experts."""


def _refuse_unsupported_model(model: nn.Module, layout: Layout) -> None:
    ep = layout.ep
    tp = layout.tp
    layers = find_experts(model)
    name = type(model).__name__
    if not layers:
        raise ModelError(
            f"parallel.ep = {ep}: {name} has no experts that are supported (modules of Transformers"
            " with one parameter for all experts, stacked along its first dimension); use"
            " parallel.ep = 1"
        )
    for experts in layers:
        if experts.count % ep:
            # ep also divides the ranks of a pipeline stage.
            common = gcd(experts.count, layout.stage_ranks)
            divisors = [degree for degree in range(1, common + 1) if common % degree == 0]
            rule = (
                f"every process has equally many of the {experts.count} experts of {experts.name},"
                f" and {experts.count} % {ep} = {experts.count % ep}"
            )
            remedy = f"use {', '.join(map(str, divisors))}"
            raise ConfigError(Problem("parallel.ep", ep, rule, remedy))

    expert_names = {name for experts in layers for name in experts.parameters}
    first_names: dict[int, str] = {}
    for second, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), second)
        if first != second and {first, second} & expert_names:
            raise ModelError(
                f"parallel.ep = {ep}: {first} and {second} are one parameter, but experts are"
                " split; use parallel.ep = 1"
            )
    config = getattr(model, "config", None)
    kind = getattr(config, "_experts_implementation", "eager")
    if kind not in _IMPLEMENTATIONS:
        raise ModelError(
            f"parallel.ep = {ep}: {name} computes experts with {kind!r}, which is not tested with"
            " expert parallelism; call model.set_experts_implementation with one of"
            f" {', '.join(_IMPLEMENTATIONS)}"
        )

    family = getattr(config, "model_type", None)
    if tp > 1 and family not in SPLIT_FAMILIES:
        raise ModelError(
            f"parallel.ep with parallel.tp = {tp}: {name} (model_type {family!r}) is"
            " not among the models for which splitting other layers together with experts is"
            f" tested: {', '.join(SPLIT_FAMILIES)}; use parallel.tp = 1"
        )


def _local_experts(parameter: nn.Parameter, mesh: Mesh) -> nn.Parameter:
    """Return a parameter as a DTensor whose local tensor contains this rank's experts."""
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


def _traffic(facts: ModelFacts, ledger: Ledger) -> dict[str, Array]:
    """Return the bytes that one rank sends per optimizer step, by collective.

    The bytes are 0 for layouts in which ep is 1.

    See Note [Traffic of expert parallelism].
    """
    experts = facts.experts
    n = ledger.ep
    if experts is None:
        return {}
    itemsize = np.ones_like(n) * facts.parameters[0].itemsize
    if ledger.compute_bytes is not None:
        itemsize = ledger.compute_bytes
    passes = ledger.accumulation * experts.layers
    m = ledger.tp
    tokens = shard_size(ledger.tokens // ledger.cp, m)

    rows = tokens * experts.per_token * experts.hidden * itemsize * (n - 1) // n
    counts = 8 * experts.count * (n - 1) // n
    # Results and gradients of tokens, which sequence parallelism does not gather.
    hidden_bytes = np.where(ledger.sequence_parallel, 0, 2 * experts.hidden * itemsize)
    weight_bytes = experts.per_token * np.maximum(itemsize, 4)
    gathered = tokens * (hidden_bytes + weight_bytes) * (m - 1)
    return {
        "reduce_scatter": passes * np.where(n > 1, 4 * rows + counts, 0),
        "all_gather": passes * np.where(n > 1, gathered, 0),
    }


class Routing(Technique):
    """Settings of load balancing between experts, and of the z loss of routers."""

    bias_update_rate: float = 0.0
    """Change of an expert's bias after a step. 0 leaves biases as they are."""
    balance: Balance = "micro_batch"
    """Tokens over which a balance loss is computed.

    micro_batch: the micro-batch of one data-parallel rank, as in Transformers. global: the
    micro-batches of all data-parallel ranks together.
    """
    z_loss: float = 0.0
    """Coefficient of the z loss, the squared log-sum-exp of the router logits. 0: no z loss."""

    @property
    def loss_settings(self) -> list[tuple[str, float | str, float | str]]:
        """Settings that change the loss, as (name, value, value that leaves the loss unchanged)."""
        settings: list[tuple[str, float | str, float | str]] = []
        if self.z_loss:
            settings.append(("experts.z_loss", self.z_loss, 0.0))
        if self.balance != "micro_batch":
            settings.append(("experts.balance", self.balance, "micro_batch"))
        return settings

    def check(self, context: TechniqueContext) -> None:
        """Refuse settings for which the tokens of the model's routers cannot be counted.

        Raises:
            ConfigError: The model does not support a setting.
            ModelError: The model does not declare its routers, or the tokens of its routers cannot
                be counted.
        """
        model = context.model
        if model is None:
            return
        if enables_balance_loss(model):
            # One check is enough, because both axes have the same requirement.
            for axis in ("pp", "cp"):
                degree = getattr(context.layout, axis)
                if degree > 1:
                    setting = f"parallel.{axis}"
                    remedy = f"set output_router_logits to False, or use {setting} = 1"
                    _check_statistics(model, f"{setting} = {degree}", remedy)
                    break
        if self.balance == "global" and not enables_balance_loss(model):
            rule = (
                f"{type(model).__name__} has no balance loss, which"
                " model.config.output_router_logits = True adds to models that support one"
            )
            remedy = 'set output_router_logits to True, or use "micro_batch"'
            raise ConfigError(Problem("experts.balance", self.balance, rule, remedy))
        if self.balance == "global":
            _check_statistics(model, 'experts.balance = "global"', 'use "micro_batch"')
        if self.z_loss and not (recorded_routers(model) and find_experts(model)):
            rule = (
                f"{type(model).__name__} has no experts, or does not declare which modules are its"
                " routers"
            )
            raise ConfigError(Problem("experts.z_loss", self.z_loss, rule, "use 0"))
        if self.bias_update_rate:
            _check_bias(model, self.bias_update_rate)

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Install `RouterStatistics` if the model cannot compute the configured loss by itself."""
        model = parts.model
        balances = enables_balance_loss(parts.model)
        # The model sees all of its micro-batch, so its own balance loss is right.
        is_local = mesh.layout.pp * mesh.layout.cp == 1 and self.balance == "micro_batch"
        if not self.z_loss and (is_local or not balances):
            return parts
        group = mesh.group("cp")
        if self.balance == "global":
            group = mesh.group(*parts.batch_axes)
        statistics = RouterStatistics(
            model,
            recorded_routers(model),
            experts=find_experts(model)[0].count,
            top_k=int(model.config.num_experts_per_tok),  # type: ignore[union-attr,arg-type]
            balances=balances,
            z_loss=self.z_loss,
            group=group,
            is_global=balances and self.balance == "global",
        )
        return replace(parts, router_statistics=statistics)

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Return the hooks that record the statistics of routers and update biases."""
        hooks: list[StepHook] = []
        statistics = parts.router_statistics
        if statistics is not None:
            hooks.append(statistics)
        if self.bias_update_rate:
            hooks.append(
                BiasUpdate(
                    parts.model,
                    list(biased_routers(parts.model)),
                    rate=self.bias_update_rate,
                    group=mesh.group(*parts.batch_axes),
                )
            )
        return hooks

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Return the ledger unchanged.

        Messages of a few values per expert are not counted.
        """
        return ledger


class BiasUpdate(StepHook):
    """Hook that counts the tokens of each expert and updates the router biases once per step.

    The counts are summed over the micro-batches of a step and over the ranks with different tokens.
    Padding, evaluations, recomputed forwards and skipped steps are ignored.
    """

    def __init__(
        self,
        model: nn.Module,
        routers: Sequence[str],
        *,
        rate: float,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Register hooks on the routers of a model.

        Args:
            model: The model on this rank.
            routers: Names of the routers that have a bias.
            rate: Amount by which a bias changes per step.
            group: The ranks with different tokens.
        """
        self.rate = rate
        self.group = group
        self._routers = [model.get_submodule(name) for name in routers]
        self._tokens = TokenMaskObserver(model)
        self._counts: list[torch.Tensor] = []
        self._totals: list[torch.Tensor] = []
        self._handles: list[RemovableHandle] = []
        for index, (name, router) in enumerate(zip(routers, self._routers, strict=True)):
            self._counts.append(torch.zeros_like(self._bias(router), dtype=torch.int64))
            self._handles.append(router.register_forward_hook(partial(self._count, index, name)))
        self.description = f"the biases of {len(routers)} routers move by {rate:g} after every step"

    @staticmethod
    def _bias(router: nn.Module) -> torch.Tensor:
        bias = direct_buffers(router)[SCORE_CORRECTION_BIAS]
        assert bias is not None
        return bias

    def _count(self, index: int, name: str, router: nn.Module, args: Any, output: Any) -> None:
        # A forward inside a backward is a recomputation.
        if not router.training or not torch.is_grad_enabled() or graph_task() is not None:
            return
        chosen = chosen_experts(output)  # [tokens, k]
        if chosen is None:
            raise ModelError(
                f"experts.bias_update_rate = {self.rate:g}: {name} does not return the experts of"
                " every token, so tokens cannot be counted; use 0"
            )
        counts = self._counts[index]
        mask = self._tokens.mask
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.numel() == len(chosen):
            counted = mask.to(chosen.dtype).reshape(-1, 1).expand_as(chosen)
        else:
            counted = torch.ones_like(chosen)
        counts.scatter_add_(0, chosen.detach().reshape(-1), counted.reshape(-1))

    def finish_reduction(self) -> None:
        """Sum the token counts of experts over the ranks with different tokens. Collective."""
        if self.group is None or not self._counts:
            self._totals = [counts.clone() for counts in self._counts]
            return
        # One message for all routers.
        summed = torch.cat(self._counts)
        dist.all_reduce(summed, group=self.group)
        self._totals = list(summed.split([len(counts) for counts in self._counts]))

    def after_step(self, end: StepEnd) -> str:
        """Raise or lower every router bias by the rate, unless the step was skipped."""
        for router, counts in zip(self._routers, self._totals, strict=True):
            if not end.skipped:
                wide = counts.to(torch.float64)
                bias = self._bias(router)
                bias.add_((wide.mean() - wide).sign().to(bias.dtype), alpha=self.rate)
        self.drop_gradients()
        return ""

    def drop_gradients(self) -> None:
        """Reset the counts of the step."""
        for counts in self._counts:
            counts.zero_()

    def release(self) -> None:
        """Remove the hooks from the model."""
        self._tokens.release()
        for handle in self._handles:
            handle.remove()


def _check_statistics(model: nn.Module, setting: str, remedy: str) -> None:
    has_numbers = all(
        isinstance(getattr(model, name, None), int)
        for name in ("num_experts", "num_experts_per_tok")
    )
    if not has_numbers or not recorded_routers(model):
        raise ModelError(
            f"{setting}: model.config.output_router_logits is True, but {type(model).__name__} does"
            " not declare which modules are its routers, so its balance loss cannot be summed over"
            f" ranks; {remedy}"
        )


def _check_bias(model: nn.Module, rate: float) -> None:
    routers = biased_routers(model)
    if not routers:
        rule = (
            f"no module of {type(model).__name__} has a buffer `{SCORE_CORRECTION_BIAS}` [experts]"
            " that could be updated"
        )
        raise ConfigError(
            Problem(
                "experts.bias_update_rate",
                rate,
                rule,
                "use 0, or a model of that kind (DeepSeek-V3, GLM-4.5)",
            )
        )
    for name in routers:
        bias = model.get_submodule(name).get_buffer(SCORE_CORRECTION_BIAS)
        if bias.dtype not in (torch.float32, torch.float64):
            raise ModelError(
                f"experts.bias_update_rate = {rate:g}: `{name}.{SCORE_CORRECTION_BIAS}` is"
                f" {dtype_name(bias.dtype)}, in which steps of this size are rounded away;"
                " keep this buffer in float32, or use 0"
            )
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ModelError(
                f"experts.bias_update_rate = {rate:g}: tokens are not counted reliably while"
                f" {name or 'the model'} recomputes its blocks itself (gradient_checkpointing is"
                " on); call model.gradient_checkpointing_disable(), and set parallel.recompute"
            )
