"""Schedules of every kind and size, for property tests."""

from hypothesis import settings
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.parallel.schedules.schedule import SCHEDULES, make_schedule

names = st.sampled_from(sorted(SCHEDULES))


def made(name, pp, microbatches, stages_per_rank=None):
    """The schedule, or the nearest micro-batch count above for which there is one."""
    fewest, most = SCHEDULES[name].stages_per_rank
    each = None if stages_per_rank is None else min(max(stages_per_rank, fewest), most or 4)
    for count in range(microbatches, microbatches + 2 * pp + 1):
        try:
            return make_schedule(name, pp=pp, microbatches=count, stages_per_rank=each)
        except ConfigError:
            continue
    raise AssertionError(
        f"{name} does not exist for {microbatches} to {microbatches + 2 * pp} micro-batches"
    )


schedules = st.builds(made, names, st.integers(1, 6), st.integers(1, 16), st.integers(1, 4))

unhurried = settings(deadline=None)
"""For property tests that build a table an example: the first needs torch, and the machine may be busy."""
