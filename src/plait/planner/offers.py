"""Techniques that this version of Plait runs, which the search may propose.

Pairs that do not work together are those of `parallel.compatibility`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from plait.cluster.layout import Layout
from plait.errors import ConfigError
from plait.parallel.compatibility import refuse_incompatible
from plait.parallel.schedules import schedule as tables
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.planner.job import RECOMPUTE, SCHEDULES

SCHEDULE_NAMES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved-1f1b",
    "interleaved-zb": "interleaved-zero-bubble",
    "zbv": "zbv",
    "dualpipev": "dualpipev",
}
"""Priced schedules by the names of `parallel.schedules.schedule`.

Other schedules are priced for published runs only.
"""
RECOMPUTE_NAMES = {
    "none": "none",
    "full": "full",
    "operators": "selective",
    "selective": "attention",
    "budget": "budget",
}
"""Priced modes of recomputation by the names of `parallel.recompute.mode`."""
RECOMPUTE_FIXED = ("none", "full", "selective")
"""Modes that a file can fix. A budget is only known after the plan has chosen it."""
SCHEDULE_INDEX = {name: SCHEDULES.index(priced) for priced, name in SCHEDULE_NAMES.items()}
RECOMPUTE_INDEX = {RECOMPUTE_NAMES[priced]: index for index, priced in enumerate(RECOMPUTE)}
"""Indices into RECOMPUTE by the names of the configuration; SCHEDULE_INDEX into SCHEDULES."""
SPLIT_BACKWARD = ("interleaved-zb", "zbv", "dualpipev")
"""Schedules that defer the gradients of weights, which ZeRO stage 3 refuses."""


@dataclass(frozen=True)
class Offers:
    """Techniques that a plan may use."""

    pipeline: bool
    schedules: tuple[str, ...]
    """Names in SCHEDULES, for several stages."""
    recompute: tuple[str, ...]
    """Names in RECOMPUTE."""
    offload: bool
    """True if the optimizer can be on the host."""
    compiled: bool
    """True if blocks are compiled, which some layouts refuse."""

    def refusal(self, *, tp: int, pp: int) -> str | None:
        """Return the reason why this version does not run these degrees, or None."""
        try:
            refuse_incompatible(
                TechniqueContext(Layout(pp=pp, tp=tp), (Compile(enabled=self.compiled),))
            )
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
        """Return True if a schedule exists for these numbers and works with the ZeRO stage.

        A split backward recomputes a block for each half. The engine supports this, but it is not
        priced yet, so such schedules are refused with recomputation.
        """
        name = SCHEDULE_NAMES[schedule]
        if (zero == 3 or recompute) and schedule in SPLIT_BACKWARD:
            return False

        return micro_batches >= pp and not tables.problems_of(
            name, pp=pp, microbatches=micro_batches, stages_per_rank=chunks
        )


def offered(*, compiled: bool = False) -> Offers:
    """Return the techniques that a configuration can enable and the engine runs."""
    kinds: tuple[str, ...] = ("none", "full", "operators", "budget")
    if compiled:
        kinds = ("none", "full")
    offers = Offers(True, tuple(SCHEDULE_NAMES), kinds, True, compiled)
    return replace(offers, pipeline=offers.refusal(tp=1, pp=2) is None)
