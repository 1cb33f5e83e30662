"""Combinations of settings that are not supported yet.

Each one is refused with its reason until a test proves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait.errors import ConfigError, Problem
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.data_parallel import DataParallel


@dataclass(frozen=True)
class UnsupportedCombination:
    """A combination of settings that is refused."""

    field: str
    """Setting that the error names."""
    value: Callable[[TechniqueContext], object]
    """Returns the value of the setting."""
    applies: Callable[[TechniqueContext], bool]
    """Returns True if a context has the combination."""
    rule: str
    remedy: str


UNSUPPORTED_COMBINATIONS: tuple[UnsupportedCombination, ...] = (
    UnsupportedCombination(
        field="parallel.cp",
        value=lambda context: context.layout.cp,
        applies=lambda context: (
            context.layout.cp > 1
            and not any("cp" in technique.batch_axes for technique in context.techniques)
        ),
        rule="no technique cuts sequences over cp",
        remedy="use 1; the processes become data parallel",
    ),
    UnsupportedCombination(
        field="compile.enabled",
        value=lambda _: "true",
        applies=lambda context: context.chosen(Compile).enabled and context.layout.tp > 1,
        rule=(
            "blocks that tensor parallelism has split are not proven to keep their gradients under"
            " torch.compile"
        ),
        remedy="use false, or parallel.tp = 1",
    ),
    UnsupportedCombination(
        field="compile.enabled",
        value=lambda _: "true",
        applies=lambda context: context.chosen(Compile).enabled and context.layout.pp > 1,
        rule="pipeline stages are not proven under torch.compile",
        remedy="use false, or parallel.pp = 1",
    ),
    UnsupportedCombination(
        field="parallel.secondary_partition",
        value=lambda context: context.chosen(DataParallel).secondary_partition,
        applies=lambda context: (
            context.chosen(DataParallel).secondary_partition > 0
            and context.layout.pp * context.layout.tp > 1
        ),
        rule=(
            "all processes create the groups of a secondary partition together, but other pipeline"
            " stages and tp slices create other groups: it would hang"
        ),
        remedy="use 0, or parallel.pp = 1 and parallel.tp = 1",
    ),
)


def refuse_incompatible(context: TechniqueContext) -> None:
    """Refuse all unsupported combinations at once.

    Raises:
        ConfigError: It lists every combination that applies.
    """
    problems = [
        Problem(combination.field, combination.value(context), combination.rule, combination.remedy)
        for combination in UNSUPPORTED_COMBINATIONS
        if combination.applies(context)
    ]
    if problems:
        raise ConfigError(*problems)
