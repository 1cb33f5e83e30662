"""Schedules for property tests, and the messages of their actions.

The messages are derived independently of `Numbered`, which the schedules themselves use.
"""

from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.parallel.schedules.schedule import SCHEDULES, Kind, Message, Payload, make_schedule


def nearest_schedule(name, pp, microbatches, stages_per_rank):
    """Return the schedule with the lowest supported number of micro-batches from `microbatches`."""
    fewest, most = SCHEDULES[name].stages_per_rank
    stages_per_rank = min(max(stages_per_rank, fewest), most or 4)
    for count in range(microbatches, microbatches + 2 * pp + 1):
        try:
            return make_schedule(name, pp=pp, microbatches=count, stages_per_rank=stages_per_rank)
        except ConfigError:
            continue
    raise AssertionError(f"{name} does not support {microbatches} micro-batches or a few more")


names = st.sampled_from(sorted(SCHEDULES))
schedules = st.builds(
    nearest_schedule, names, st.integers(1, 6), st.integers(1, 16), st.integers(1, 4)
)


def sent_by(action):
    """Return the message that an action sends. The second half of a backward sends none."""
    if action.kind is Kind.WEIGHT:
        return None
    payload = Payload.ACTIVATION if action.kind is Kind.FORWARD else Payload.GRADIENT
    return Message(payload, action.stage, action.microbatch)


def needed_by(action, *, stages):
    """Return the results that an action needs in a pipeline of `stages` stages.

    Results of its own stage are included.
    """
    stage = action.stage
    previous_activation = Message(Payload.ACTIVATION, stage - 1, action.microbatch)
    activation = Message(Payload.ACTIVATION, stage, action.microbatch)
    gradient = Message(Payload.GRADIENT, stage, action.microbatch)
    next_gradient = Message(Payload.GRADIENT, stage + 1, action.microbatch)
    if action.kind is Kind.FORWARD:
        return [previous_activation] if stage > 0 else []
    if action.kind is Kind.WEIGHT:
        return [gradient]
    return [activation, next_gradient] if stage < stages - 1 else [activation]
