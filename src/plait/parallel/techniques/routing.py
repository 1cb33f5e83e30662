"""Routing of a mixture-of-experts model: balance losses over ranks, and biases that are updated."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from plait.cluster.mesh import Mesh
from plait.errors import ConfigError, ModelError, Problem
from plait.model.experts import (
    SCORE_CORRECTION_BIAS,
    biased_routers,
    enables_balance_loss,
    find_experts,
    recorded_routers,
)
from plait.model.facts import ModelFacts
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.experts.bias_update import BiasUpdate
from plait.parallel.experts.router_statistics import RouterStatistics
from plait.parallel.hooks import StepHook
from plait.parallel.parts import Parts
from plait.parallel.technique import Technique, TechniqueContext
from plait.units import dtype_name

Balance = Literal["micro_batch", "global"]


class Routing(Technique):
    """Balance of the tokens between experts."""

    bias_update_rate: float = 0.0
    """Change of an expert's bias after a step. 0 leaves biases as they are."""
    balance: Balance = "micro_batch"
    """Tokens of a balance loss.

    micro_batch: those of a data-parallel rank, as in Transformers. global: those that all ranks
    compute at the same time.
    """
    z_loss: float = 0.0
    """Coefficient of the z loss, the squared logarithm of the sum of exponentials of router logits.

    0: no z loss.
    """

    @property
    def added(self) -> list[tuple[str, float | str, float | str]]:
        """Settings that change the loss: (setting, its value, the value without effect)."""
        settings: tuple[tuple[str, float | str, float | str], ...] = (
            ("experts.z_loss", self.z_loss, 0.0),
            ("experts.balance", self.balance, "micro_batch"),
        )
        return [setting for setting in settings if setting[1] != setting[2]]

    def check(self, context: TechniqueContext) -> None:
        """Refuse settings that would count a part of the tokens, or nothing.

        Raises:
            ConfigError: The model does not support a setting.
            ModelError: The model does not show its routers.
        """
        model = context.model
        if model is None:
            return
        if enables_balance_loss(model):
            # One check is enough, because both need the same of the model.
            for axis in ("pp", "cp"):
                degree = getattr(context.layout, axis)
                if degree > 1:
                    setting = f"parallel.{axis}"
                    _check_statistics(model, f"{setting} = {degree}", f"use {setting} = 1")
                    break
        if self.balance == "global" and not enables_balance_loss(model):
            rule = (
                f"{type(model).__name__} has no balance loss, which"
                " model.config.output_router_logits = True adds to models that know one"
            )
            raise ConfigError(
                Problem("experts.balance", self.balance, rule, 'set that, or use "micro_batch"')
            )
        if self.balance == "global":
            _check_statistics(model, 'experts.balance = "global"', 'use "micro_batch"')
        if self.z_loss and not (recorded_routers(model) and find_experts(model)):
            rule = f"{type(model).__name__} does not say which modules its routers are, or has none"
            raise ConfigError(Problem("experts.z_loss", self.z_loss, rule, "use 0"))
        if self.bias_update_rate:
            _check_bias(model, self.bias_update_rate)

    def apply(self, parts: Parts, mesh: Mesh) -> Parts:
        """Record the statistics of routers if the model's own loss is not enough."""
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
        """Return the hooks that release the statistics and update biases."""
        hooks: list[StepHook] = []
        statistics = parts.router_statistics
        if statistics is not None:
            hooks.append(RecordedBalance(statistics))
        if self.bias_update_rate:
            names = list(biased_routers(parts.model))
            hooks.append(
                BiasUpdate(
                    parts.model,
                    names,
                    rate=self.bias_update_rate,
                    group=mesh.group(*parts.batch_axes),
                )
            )
        return hooks

    def account(self, ledger: Ledger, facts: ModelFacts) -> Ledger:
        """Return the ledger unchanged: a few numbers per expert are counted as control."""
        return ledger


class RecordedBalance(StepHook):
    """Restores the model's own balance loss when the model is released."""

    def __init__(self, statistics: RouterStatistics) -> None:
        self.statistics = statistics

    def release(self) -> None:
        """Remove the hooks of the statistics."""
        self.statistics.release()


def _check_statistics(model: nn.Module, setting: str, remedy: str) -> None:
    has_numbers = all(
        isinstance(getattr(model, name, None), int)
        for name in ("num_experts", "num_experts_per_tok")
    )
    if not has_numbers or not recorded_routers(model):
        raise ModelError(
            f"{setting}: model.config.output_router_logits is true, and {type(model).__name__} does"
            " not say which modules its routers are, so their balance cannot be summed over ranks;"
            f" set it to False, or {remedy}"
        )


def _check_bias(model: nn.Module, rate: float) -> None:
    routers = biased_routers(model)
    if not routers:
        rule = (
            f"no module of {type(model).__name__} has a buffer `{SCORE_CORRECTION_BIAS}` [experts],"
            " which it would update"
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
                f" {dtype_name(bias.dtype)}, in which steps of that size are lost;"
                " keep this buffer in float32, or use 0"
            )
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ModelError(
                f"experts.bias_update_rate = {rate:g}: {name or 'the model'} recomputes its blocks"
                " itself (gradient_checkpointing is on), where tokens are not counted reliably;"
                " call model.gradient_checkpointing_disable(), and set parallel.recompute"
            )
