"""What this version runs, read from the configuration's own schema and the table of refused pairs:
the search proposes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait.cluster.layout import Layout
from plait.config.schema.config import ParallelSection, ZeroSection
from plait.errors import ConfigError
from plait.parallel.compatibility import refuse_incompatible
from plait.parallel.compile import Compile
from plait.parallel.schedules import schedule as tables
from plait.parallel.technique import Context
from plait.planner.job import RECOMPUTE, SCHEDULES

SCHEDULE_NAMES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved-1f1b",
    "interleaved-zb": "interleaved-zero-bubble",
    "zbv": "zbv",
    "dualpipev": "dualpipev",
}
"""Schedules that are priced, by the names of `parallel.schedules.schedule`. Others are priced for
published runs alone.
"""
RECOMPUTE_NAMES = {
    "none": "none",
    "full": "full",
    "operators": "selective",
    "selective": "attention",
    "budget": "budget",
}
"""What is priced, by the names of `parallel.recompute.mode`, which has no mode for attention's core
alone.
"""
RECOMPUTE_FIXED = ("none", "full", "selective")
"""Those that a file can fix; how much a budget recomputes is known once a plan has chosen it."""
SCHEDULE_INDEX = {name: SCHEDULES.index(priced) for priced, name in SCHEDULE_NAMES.items()}
RECOMPUTE_INDEX = {RECOMPUTE_NAMES[priced]: index for index, priced in enumerate(RECOMPUTE)}
"""Their numbers in a layout, by those names."""
SPLIT_BACKWARD = ("interleaved-zb", "zbv", "dualpipev")
"""Schedules that defer the gradients of weights, which ZeRO stage 3 refuses."""


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
        """Why this version does not run a layout of these degrees; None where it does, or need
        not.
        """
        if self.compiled is None:
            return None
        try:
            refuse_incompatible(Context(Layout(pp=pp, tp=tp), (Compile(enabled=self.compiled),)))
        except ConfigError as error:
            return error.problems[0].rule
        return None

    def runs(
        self,
        schedule: str,
        *,
        pp: int,
        micro_batches: int,
        chunks: int,
        zero: int,
        recompute: bool = False,
    ) -> bool:
        """Whether a schedule exists for these numbers, and with this ZeRO stage; and whether
        recomputation is priced with it: a backward in halves computes a block again for each half,
        which the engine runs and this planner does not count yet.
        """
        if self.compiled is None:
            return micro_batches >= pp
        name = SCHEDULE_NAMES[schedule]
        if (zero == 3 or recompute) and schedule in SPLIT_BACKWARD:
            return False
        return micro_batches >= pp and not tables.problems_of(
            name, pp=pp, microbatches=micro_batches, stages_per_rank=chunks
        )


EVERYTHING = Offers(True, SCHEDULES[1:], RECOMPUTE, True)
"""What can be priced, whether it runs or not."""


def offered(*, compiled: bool = False) -> Offers:
    """The layouts that a configuration of this version can contain and its engine runs."""
    whole = Offers(
        True,
        tuple(SCHEDULE_NAMES),
        ("none",),
        "offload_optimizer" in ZeroSection.model_fields,
        compiled,
    )
    kinds = ("none", "full") if compiled else ("none", "full", "operators", "budget")
    return Offers(
        pipeline=whole.refusal(tp=1, pp=2) is None,
        schedules=whole.schedules,
        recompute=kinds if "recompute" in ParallelSection.model_fields else ("none",),
        offload=whole.offload,
        compiled=compiled,
    )
