"""What a step does for the routers of a mixture-of-experts model: the balance loss over pipeline stages and parts of sequences, and biases
that are updated."""

from __future__ import annotations

import torch
from torch import nn

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, ModelError, Problem
from plait.model.experts import BIAS, biased_routers, recorded_routers, wants_balance_loss
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.experts.bias_update import BiasUpdate
from plait.parallel.experts.router_statistics import RouterStatistics
from plait.parallel.hooks import StepHook
from plait.parallel.technique import Context, Parts, Technique
from plait.parallel.tensor.tensor_parallel import TensorParallel


class Routing(Technique):
    """How routers are kept in balance."""

    bias_update_rate: float = 0.0
    """By how much the bias of an expert changes after a step; 0 leaves biases as they are."""

    def check(self, context: Context) -> None:
        """Raise ConfigError or ModelError for what would be counted on a part of the tokens, or not at all."""
        model = context.model
        if model is None:
            return
        counts = bool(self.bias_update_rate) or wants_balance_loss(model)
        if counts and context.layout.tp > 1 and context.chosen(TensorParallel).sequence_parallel:
            what = "experts.bias_update_rate is set" if self.bias_update_rate else "model.config.output_router_logits is true"
            rule = f"{what}, and a router that sees a part of a sequence counts that part alone"
            raise ConfigError(Problem("parallel.sequence_parallel", "true", rule, "use false"))
        cut = next((f"{axis} = {getattr(context.layout, axis)}" for axis in ("pp", "cp") if getattr(context.layout, axis) > 1), None)
        if cut is not None and wants_balance_loss(model):
            _check_statistics(model, cut)
        if self.bias_update_rate:
            _check_bias(model, self.bias_update_rate)

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Collect what the balance loss is made of where no rank has all of it."""
        model = parts.model
        if mesh.layout.pp * mesh.layout.cp == 1 or not wants_balance_loss(model):
            return parts
        # The model's own sum would be of its last stage, or of a part of the sequences.
        model.config.output_router_logits = False  # type: ignore[union-attr]
        routers = recorded_routers(model)
        return parts.with_notes(
            RouterStatistics(
                model,
                routers,
                experts=model.num_experts,  # type: ignore[arg-type]
                top_k=model.num_experts_per_tok,  # type: ignore[arg-type]
                group=mesh.group("cp"),
            )
        )

    def attach(self, parts: Parts, mesh: Mesh) -> list[StepHook]:
        """Count, and update biases."""
        hooks: list[StepHook] = []
        statistics = parts.noted(RouterStatistics)
        if statistics is not None:
            hooks.append(RecordedBalance(parts.model, statistics))
        if self.bias_update_rate:
            names = list(biased_routers(parts.model))
            hooks.append(BiasUpdate(parts.model, names, rate=self.bias_update_rate, group=mesh.group(*parts.batch_axes)))
        return hooks

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """A few numbers for every expert, which count as control."""
        return ledger


class RecordedBalance(StepHook):
    """Restores what `Routing` has changed of a model."""

    def __init__(self, model: nn.Module, statistics: RouterStatistics) -> None:
        self.model, self.statistics = model, statistics

    def release(self) -> None:
        """The model's own balance loss."""
        self.statistics.release()
        self.model.config.output_router_logits = True  # type: ignore[union-attr]


def _check_statistics(model: nn.Module, cut: str) -> None:
    known = all(isinstance(getattr(model, name, None), int) for name in ("num_experts", "num_experts_per_tok"))
    if not known or not recorded_routers(model):
        raise ModelError(
            f"parallel.{cut}: model.config.output_router_logits is true, and {type(model).__name__} does not say which modules its routers "
            f"are, so their balance cannot be summed over ranks; set it to False, or use parallel.{cut[:2]} = 1"
        )


def _check_bias(model: nn.Module, rate: float) -> None:
    routers = biased_routers(model)
    if not routers:
        rule = f"no module of {type(model).__name__} has a buffer `{BIAS}` [experts], which it would update"
        raise ConfigError(Problem("experts.bias_update_rate", rate, rule, "use 0, or a model of that kind (DeepSeek-V3, GLM-4.5)"))
    for name in routers:
        bias = model.get_submodule(name).get_buffer(BIAS)
        if bias.dtype not in (torch.float32, torch.float64):
            raise ModelError(
                f"experts.bias_update_rate = {rate:g}: `{name}.{BIAS}` is {str(bias.dtype).removeprefix('torch.')}, in which steps of that "
                "size are lost; keep this buffer in float32, or use 0"
            )
    own = next((name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False) is True), None)
    if own is not None:
        raise ModelError(
            f"experts.bias_update_rate = {rate:g}: {own or 'the model'} recomputes its blocks itself (gradient_checkpointing is on), where "
            "tokens are not counted reliably; call model.gradient_checkpointing_disable(), and set parallel.recompute"
        )
