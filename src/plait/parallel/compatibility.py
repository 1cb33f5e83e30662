"""Pairs of settings that do not go together yet, as data. Each is refused with its reason until a test proves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait.cluster.layout import Layout
from plait.errors import ConfigError, Problem
from plait.parallel.compile import Compile


@dataclass(frozen=True)
class Refusal:
    """`applies` says whether a configuration has the pair."""

    field: str
    value: Callable[[Layout, Compile], object]
    applies: Callable[[Layout, Compile], bool]
    rule: str
    remedy: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        field="parallel.cp",
        value=lambda layout, _: layout.cp,
        applies=lambda layout, _: layout.cp > 1,
        rule="this version runs data, tensor and pipeline parallelism",
        remedy="use 1; the processes become data parallel",
    ),
    Refusal(
        field="compile.enabled",
        value=lambda *_: "true",
        applies=lambda layout, compiled: compiled.enabled and layout.tp > 1,
        rule="blocks that tensor parallelism has split are not proven to keep their gradients under torch.compile",
        remedy="use false, or parallel.tp = 1",
    ),
    Refusal(
        field="compile.enabled",
        value=lambda *_: "true",
        applies=lambda layout, compiled: compiled.enabled and layout.pp > 1,
        rule="pipeline stages are not proven under torch.compile",
        remedy="use false, or parallel.pp = 1",
    ),
)


def refuse_incompatible(layout: Layout, compiled: Compile) -> None:
    """Raise ConfigError with every refused pair."""
    problems = [Problem(r.field, r.value(layout, compiled), r.rule, r.remedy) for r in REFUSALS if r.applies(layout, compiled)]
    if problems:
        raise ConfigError(*problems)
