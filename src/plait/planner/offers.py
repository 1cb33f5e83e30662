"""What this version runs, read from the configuration's own schema and the table of refused pairs: the search proposes nothing else.

Context and expert parallelism are priced, because published runs use them, and are not proposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.cluster.layout import Layout
from plait.config.schema import ParallelSection, ZeroSection
from plait.errors import ConfigError
from plait.parallel.compatibility import refuse_incompatible
from plait.parallel.compile import Compile
from plait.planner.job import RECOMPUTE, SCHEDULES


@dataclass(frozen=True)
class Offers:
    """Techniques that a plan may use."""

    pipeline: bool
    schedules: tuple[str, ...]
    """Of SCHEDULES, for more than one stage."""
    recompute: tuple[str, ...]
    """Of RECOMPUTE."""
    offload: bool
    """Optimizer states and their step on the host."""
    compiled: bool | None = None
    """Whether blocks are compiled, which some layouts refuse; None asks for nothing that runs."""

    def refusal(self, *, tp: int, pp: int) -> str | None:
        """Why this version does not run a layout of these degrees; None where it does, or need not."""
        if self.compiled is None:
            return None
        try:
            refuse_incompatible(Layout(pp=pp, tp=tp), Compile(enabled=self.compiled))
        except ConfigError as error:
            return error.problems[0].rule
        return None


EVERYTHING = Offers(True, SCHEDULES[1:], RECOMPUTE, True)
"""What can be priced, whether it runs or not."""


def offered(*, compiled: bool = False) -> Offers:
    """What a configuration of this version can say and its engine runs."""
    pipeline = _runs(Layout(pp=2))
    recompute = ("none", "full", "operators") if "recompute" in ParallelSection.model_fields else ("none",)
    return Offers(
        pipeline=pipeline,
        schedules=("gpipe", "1f1b") if pipeline else (),
        recompute=recompute,
        offload="offload_optimizer" in ZeroSection.model_fields,
        compiled=compiled,
    )


def _runs(layout: Layout) -> bool:
    try:
        refuse_incompatible(layout, Compile())
    except ConfigError:
        return False
    return True
