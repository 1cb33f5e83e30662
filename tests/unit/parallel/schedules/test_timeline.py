"""The simulator against the published formulas of every schedule, and against a second way to find the same times.

Times are of all stages of a rank together for one micro-batch: F forward, I and W the halves of the backward, B = I + W. p ranks, m
micro-batches, v stages a rank. "Overhead" is the length of the step less m (F + B), the work of one rank.
"""

from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from plait.errors import InputError
from plait.parallel.schedules.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Message,
    Payload,
    destination,
    make_schedule,
    messages,
)
from plait.parallel.schedules.timeline import (
    Durations,
    Span,
    Timeline,
    even,
    peak_in_flight,
    simulate,
)
from tests.unit.parallel.tables import schedules, unhurried
from tests.unit.parallel.waited_for import needed_by

ranks = st.integers(1, 8)
quarters = st.integers(1, 12).map(lambda n: n / 4)
WAVES = {"gpipe": (1, 1), "1f1b": (1, 1), "looped-bfs": (1, 4), "interleaved-1f1b": (2, 4)}
"""The schedules with whole backwards, and the stages a rank that are tried."""


def run(schedule, f, i, w):
    return simulate(schedule, even(schedule, forward=f, input=i, weight=w))


def overhead(schedule, f, i, w):
    """The length of the step less the work of one rank."""
    return run(schedule, f, i, w).total - schedule.microbatches * (f + i + w)


@unhurried
@given(st.data(), st.sampled_from(sorted(WAVES)), ranks, quarters, quarters, quarters)
def test_bubble_of_whole_backwards(data, name, p, f, i, w):
    """Overhead (p - 1)(F + B)/v and bubble (p - 1)/(v m + p - 1): arXiv:2104.04473, sections 2.2 and 2.2.2; arXiv:2211.05953 for looped.

    With v > 1 they assume m >= p. Below, each of the v - 1 turns waits for the first micro-batch to come around: (p - m) more slots a turn.
    """
    v = data.draw(st.integers(*WAVES[name]))
    counts = st.integers(1, 3 * p)
    if name == "interleaved-1f1b":
        counts = counts.filter(lambda m: m % max(1, m // p) == 0)
    m = data.draw(counts)
    schedule = make_schedule(name, pp=p, microbatches=m, stages_per_rank=v)
    slots = p - 1 + (v - 1) * max(0, p - m)
    assert overhead(schedule, f, i, w) == pytest.approx(slots * (f + i + w) / v)
    timeline = run(schedule, f, i, w)
    bubble = pytest.approx(slots / (v * m + slots))
    # With equal stages every rank is idle for the same time.
    assert [timeline.bubble_overall, *map(timeline.bubble, range(p))] == [bubble] * (p + 1)


@unhurried
@given(ranks, st.integers(2, 4), st.integers(1, 4), quarters, quarters, quarters)
def test_bubble_of_interleaved_zero_bubble(p, v, rounds, f, i, w):
    """ZB1P's overhead is (p - 1)(F + B - 2W), with B = I + W (arXiv:2401.10241, table 2), here over v. It assumes that a W is no longer
    than what it fills; otherwise the wait for the first F or I down the pipeline remains."""
    name = "interleaved-zero-bubble"
    schedule = make_schedule(name, pp=p, microbatches=rounds * p, stages_per_rank=v)
    assert overhead(schedule, f, i, w) == pytest.approx((p - 1) * max(f + i - w, f, i) / v)


@unhurried
@given(st.data(), ranks, quarters, quarters, quarters)
def test_bubble_of_zbv(data, p, f, i, w):
    """The paper's ZB-V (arXiv:2401.10241, section 6) has no bubble at F = I = W, counted from a rank's own first action to its last: true
    of torch's table from 2p - 1 micro-batches on. Over the whole step, rank r begins r F / 2 later and all end together with the last: (p
    - 1) F / 2. Other times: (p - 1) I / 2 where F <= I and W <= I <= 2W (found here, not published)."""
    assume(f <= i and w <= i <= 2 * w)
    m = data.draw(st.integers(2 * p - 1, 4 * p))
    schedule = make_schedule("zbv", pp=p, microbatches=m)
    assert overhead(schedule, f, i, w) == pytest.approx((p - 1) * i / 2)
    timeline = run(schedule, f, f, f)
    for rank, row in enumerate(timeline.ranks):
        assert row[-1].end - row[0].start == pytest.approx(timeline.busy(rank))


@unhurried
@given(st.data(), ranks, quarters, quarters, quarters)
def test_bubble_of_dualpipev(data, p, f, i, w):
    """DeepSeek's README gives (p - 1)(F&B + B - 3W)/2, F&B being the pair as one unit of work that hands both results on at its end.

    It holds for torch's pairs run so (with nothing gained by the overlap: F&B = F + B). These tables run the two one after the other, so
    the forward's result leaves before the backward begins, and the overhead is (p - 1)(F + I - W)/2, the published one less (p - 1) I /
    2; or (p - 1) F / 2 where W > I. Both for I <= F <= B.
    """
    assume(i <= f <= i + w)
    m = data.draw(st.integers(2 * p, 4 * p))
    schedule = make_schedule("dualpipev", pp=p, microbatches=m)
    assert overhead(schedule, f, i, w) == pytest.approx((p - 1) * max(f + i - w, f) / 2)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 7), (4, 8), (8, 16), (8, 20)])
def test_bubble_of_dualpipev_in_pairs(p, m):
    """The published formula, F = I = W: (p - 1)(F + B + B - 3W)/2 = p - 1 for torch's pairs as units."""
    stage = SimpleNamespace(num_stages=2 * p, group_size=p, group_rank=0, submod=None)
    order = ScheduleDualPipeV([stage, stage], m).pipeline_order
    units = [
        [action.sub_actions or (action,) for action in order[rank] if action is not None]
        for rank in range(p)
    ]
    there, free = {}, [0.0] * p
    while any(units):
        for rank in range(p):
            if not units[rank]:
                continue
            unit = [
                Action(a.stage_index, Kind(a.computation_type.value), a.microbatch_index)
                for a in units[rank][0]
            ]
            needs = [need for action in unit for need in needed_by(action, stages=2 * p)]
            if any(need not in there for need in needs):
                continue
            del units[rank][0]
            start = max([free[rank], *(there[need] for need in needs)])
            free[rank] = start + sum(1.0 if a.kind is Kind.BACKWARD else 0.5 for a in unit)
            for action in unit:
                payload = Payload.ACTIVATION if action.kind is Kind.FORWARD else Payload.GRADIENT
                if action.kind is not Kind.WEIGHT:
                    there[Message(payload, action.stage, action.microbatch)] = free[rank]
    assert max(free) - 3 * m == pytest.approx(p - 1)


@unhurried
@given(schedules)
def test_peak_in_flight(schedule):
    """Count the stages whose activations exist at once.

    GPipe and looped: all. 1F1B: p - rank. Interleaved (arXiv:2205.05198, section 4.2.3): p + (p - 1)/v in full stages on rank 0. Zero
    bubble keeps them until W, p on every rank. DualPipeV: 2p + 1 stages.
    """
    p, m = schedule.pp, schedule.microbatches
    v = schedule.stages // p
    # An interleaved schedule takes so many micro-batches through a stage before the next: p where p divides m.
    turn = m // max(1, m // p)
    waves = [2 * (p - 1 - rank) + 1 for rank in range(p)]
    expected = {
        "gpipe": [m] * p,
        "looped-bfs": [v * m] * p,
        "1f1b": [min(m, p - rank) for rank in range(p)],
        "interleaved-1f1b": [min(v * m, (v - 1) * turn + wave) for wave in waves],
        "interleaved-zero-bubble": [min(v * m, (v - 1) * turn + p)] * p,
        "zbv": [2 * p] * p,
        "dualpipev": [2 * p + 1] * p,
    }[schedule.name]
    stages = peak_in_flight(schedule, sizes=(1,) * schedule.stages)
    if schedule.name == "zbv" and m < 2 * p - 1:
        assert all(count <= min(2 * m, 2 * p) for count in stages)
    else:
        assert list(stages) == expected
    assert peak_in_flight(schedule) == pytest.approx([count / v for count in stages])
    if schedule.name == "interleaved-1f1b" and m % p == 0 and m > p:
        assert peak_in_flight(schedule)[0] == pytest.approx(p + (p - 1) / v)


@unhurried
@given(st.data(), schedules)
def test_peak_with_unequal_stages(data, schedule):
    """The peak in bytes is the largest sum over micro-batches whose activations exist, counted again at every action."""
    stages = schedule.stages
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))
    peaks = peak_in_flight(schedule, sizes=sizes)
    for rank, row in enumerate(schedule.ranks):
        most, alive = 0, set()
        for action in row:
            if action.kind is Kind.FORWARD:
                alive.add((action.stage, action.microbatch))
            most = max(most, sum(sizes[stage] for stage, _ in alive))
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                alive.remove((action.stage, action.microbatch))
        assert peaks[rank] == most


def durations_of(schedule, data):
    """Unequal stages and boundaries, some of them free."""

    def draw(count):
        quarters = st.lists(st.integers(0, 8), min_size=count, max_size=count)
        return tuple(n / 4 for n in data.draw(quarters))

    stages = schedule.stages
    return Durations(draw(stages), draw(stages), draw(stages), draw(stages - 1))


def relaxed(schedule, durations):
    """The earliest ends, found by raising them until every rule holds: the order of each rank, what an action needs, one message at a time
    on a link."""
    ends = {action: 0.0 for row in schedule.ranks for action in row}
    by = {
        (a.stage, a.microbatch, a.kind is Kind.FORWARD): a
        for a in ends
        if a.kind is not Kind.WEIGHT
    }
    made = {
        m: by[m.stage, m.microbatch, m.payload is Payload.ACTIVATION]
        for pair in messages(schedule).values()
        for m in pair
    }
    arrivals = dict.fromkeys(made, 0.0)
    while True:
        before = (dict(ends), dict(arrivals))
        for order in messages(schedule).values():
            last = 0.0
            for message in order:
                boundary = message.stage - (message.payload is Payload.GRADIENT)
                last = arrivals[message] = max(last, ends[made[message]]) + durations.send[boundary]
        for row in schedule.ranks:
            last = 0.0
            for action in row:
                for need in needed_by(action, stages=schedule.stages):
                    own = by[need.stage, need.microbatch, need.payload is Payload.ACTIVATION]
                    crosses = need.stage != action.stage and destination(schedule, need) is not None
                    last = max(last, arrivals[need] if crosses else ends[own])
                last = ends[action] = last + durations.duration(action)
        if before == (ends, arrivals):
            return ends


@settings(max_examples=100, deadline=None)
@given(st.data(), schedules)
def test_times_are_the_earliest_possible(data, schedule):
    """Stages differ, and messages take time, also longer than a computation."""
    durations = durations_of(schedule, data)
    timeline = simulate(schedule, durations)
    ends = relaxed(schedule, durations)
    for rank, (row, planned) in enumerate(zip(timeline.ranks, schedule.ranks, strict=True)):
        assert tuple(span.action for span in row) == planned
        lengths = [durations.duration(action) for action in planned]
        assert [span.end for span in row] == [ends[action] for action in planned]
        assert [span.end - span.start for span in row] == lengths
        assert timeline.busy(rank) == sum(lengths)
    assert timeline.total == max(ends.values())


def test_the_least_timeline():
    schedule = make_schedule("1f1b", pp=1, microbatches=1)
    forward, backward = Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)
    spans = ((Span(forward, 0, 1), Span(backward, 1, 3)),)
    assert simulate(schedule, even(schedule)) == Timeline(schedule, spans)
    nothing = run(schedule, 0, 0, 0)
    assert nothing.total == 0 and nothing.bubble_overall == 0


def test_wrong_durations():
    """Durations of another number of stages, negative ones, and those that are no numbers are refused."""
    schedule = make_schedule("1f1b", pp=2, microbatches=2)
    for bad in (
        Durations((1,), (1, 1), (1, 1), (0,)),
        Durations((1, 1), (1, 1), (1, 1), ()),
        Durations((1, -1), (1, 1), (1, 1), (0,)),
        Durations((1, 1), (1, 1), (1, 1), (float("nan"),)),
        Durations((1, 1), (1, float("inf")), (1, 1), (0,)),
    ):
        with pytest.raises(InputError, match="durations"):
            simulate(schedule, bad)
    with pytest.raises(InputError, match="sizes has 1 values"):
        peak_in_flight(schedule, sizes=(1,))


def test_all_schedules_are_covered():
    assert set(SCHEDULES) == {*WAVES, "interleaved-zero-bubble", "zbv", "dualpipev"}
