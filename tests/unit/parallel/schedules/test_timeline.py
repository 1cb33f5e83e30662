"""Simulated times of a step equal the published formulas, and the earliest possible times.

There are p ranks with v stages each, and m micro-batches. F, I, W and B = I + W are the times of
the forward, both halves of the backward and the complete backward of one micro-batch, for all
stages of a rank together. The overhead is the length of the step minus m (F + B), the work of one
rank.
"""

from collections import deque
from itertools import chain
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
from tests.unit.parallel.tables import needed_by, schedules, sent_by

ranks = st.integers(1, 8)
quarters = st.integers(1, 12).map(lambda n: n / 4)
WAVES = {"gpipe": (1, 1), "1f1b": (1, 1), "looped-bfs": (1, 4), "interleaved-1f1b": (2, 4)}
"""Schedules that do not split the backward, with the tested range of v."""


def run(schedule, f, i, w):
    return simulate(schedule, even(schedule, forward=f, input=i, weight=w))


def overhead(schedule, f, i, w):
    return run(schedule, f, i, w).total - schedule.microbatches * (f + i + w)


@given(st.data(), st.sampled_from(sorted(WAVES)), ranks, quarters, quarters, quarters)
def test_bubble_of_whole_backwards(data, name, p, f, i, w):
    """The overhead is (p - 1)(F + B)/v and the bubble (p - 1)/(v m + p - 1).

    The formulas are from arXiv:2104.04473, sections 2.2 and 2.2.2, and arXiv:2211.05953 (looped).
    With v > 1 they assume m >= p. With fewer micro-batches each of the v - 1 turns waits p - m
    slots more, until the first micro-batch arrives again.
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


@given(ranks, st.integers(2, 4), st.integers(1, 4), quarters, quarters, quarters)
def test_bubble_of_interleaved_zero_bubble(p, v, rounds, f, i, w):
    """The overhead is (p - 1)(F + B - 2W)/v (arXiv:2401.10241, table 2, ZB1P).

    The formula assumes that a W is no longer than the gap that it fills. Otherwise the wait for the
    first F or I along the pipeline remains.
    """
    name = "interleaved-zero-bubble"
    schedule = make_schedule(name, pp=p, microbatches=rounds * p, stages_per_rank=v)
    assert overhead(schedule, f, i, w) == pytest.approx((p - 1) * max(f + i - w, f, i) / v)


@given(st.data(), ranks, quarters, quarters, quarters)
def test_bubble_of_zbv(data, p, f, i, w):
    """No rank is idle between its first and its last action if F = I = W.

    arXiv:2401.10241, section 6, says so of ZB-V, and it is true of torch's table from 2p - 1
    micro-batches on. The overhead of the step, (p - 1) I / 2 where F <= I and W <= I <= 2W, is not
    published: the ranks start one after the other and end together.
    """
    assume(f <= i and w <= i <= 2 * w)
    m = data.draw(st.integers(2 * p - 1, 4 * p))
    schedule = make_schedule("zbv", pp=p, microbatches=m)
    assert overhead(schedule, f, i, w) == pytest.approx((p - 1) * i / 2)
    timeline = run(schedule, f, f, f)
    for rank, row in enumerate(timeline.ranks):
        assert row[-1].end - row[0].start == pytest.approx(timeline.busy(rank))


@given(st.data(), ranks, quarters, quarters, quarters)
def test_bubble_of_dualpipev(data, p, f, i, w):
    """The overhead is (p - 1)(F + I - W)/2, or (p - 1) F / 2 where W > I, for I <= F <= B.

    DeepSeek's README gives (p - 1)(F&B + B - 3W)/2, which is (p - 1) I / 2 more: there a forward
    and a backward are one unit F&B that sends both results at its end. Plait's tables run one after
    the other, so the forward's result is sent before the backward begins.
    """
    assume(i <= f <= i + w)
    m = data.draw(st.integers(2 * p, 4 * p))
    schedule = make_schedule("dualpipev", pp=p, microbatches=m)
    assert overhead(schedule, f, i, w) == pytest.approx((p - 1) * max(f + i - w, f) / 2)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 7), (4, 8), (8, 16), (8, 20)])
def test_bubble_of_dualpipev_in_pairs(p, m):
    """DeepSeek's formula, p - 1 if F = I = W = 1/2, holds for torch's pairs as units."""
    stage = SimpleNamespace(num_stages=2 * p, group_size=p, group_rank=0, submod=None)
    order = ScheduleDualPipeV([stage, stage], m).pipeline_order
    units = [deque(filter(None, order[rank])) for rank in range(p)]
    arrivals = {}
    ends = [0.0] * p

    def run_next(rank):
        """Run the next unit of the rank, if all that it needs has arrived."""
        actions = []
        needs = set()
        for a in units[rank][0].sub_actions or (units[rank][0],):
            action = Action(a.stage_index, Kind(a.computation_type.value), a.microbatch_index)
            actions.append(action)
            needs.update(needed_by(action, stages=2 * p))
        if not needs <= arrivals.keys():
            return
        units[rank].popleft()
        start = max([ends[rank], *(arrivals[need] for need in needs)])
        duration = sum(1.0 if action.kind is Kind.BACKWARD else 0.5 for action in actions)
        ends[rank] = start + duration
        for action in actions:
            arrivals[sent_by(action)] = ends[rank]

    while any(units):
        for rank in range(p):
            if units[rank]:
                run_next(rank)
    assert max(ends) - 3 * m == pytest.approx(p - 1)


@given(schedules)
def test_peak_in_flight(schedule):
    """Count the stages whose activations exist at the same time.

    GPipe and looped schedules keep all. 1F1B keeps p - rank. Interleaved 1F1B keeps p + (p - 1)/v
    complete stages on rank 0 (arXiv:2205.05198, section 4.2.3). Zero bubble schedules keep them
    until W, which makes p on every rank. DualPipeV keeps 2p + 1 stages.
    """
    p = schedule.pp
    m = schedule.microbatches
    v = schedule.stages // p
    # An interleaved schedule takes this many micro-batches through a stage before the next one. It
    # is p where p divides m.
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


@given(st.data(), schedules)
def test_peak_with_unequal_stages(data, schedule):
    """The peak is the largest sum of sizes over all stages and micro-batches in flight."""
    stages = schedule.stages
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages))
    peaks = peak_in_flight(schedule, sizes=sizes)
    for rank, row in enumerate(schedule.ranks):
        totals = [0]
        for action in row:
            if action.kind is Kind.FORWARD:
                totals.append(totals[-1] + sizes[action.stage])
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                totals.append(totals[-1] - sizes[action.stage])
        assert peaks[rank] == max(totals)


def durations_of(schedule, data):
    """Draw durations of stages and messages, some of which are 0."""

    def draw(count):
        quarters = st.lists(st.integers(0, 8), min_size=count, max_size=count)
        return tuple(n / 4 for n in data.draw(quarters))

    stages = schedule.stages
    return Durations(draw(stages), draw(stages), draw(stages), draw(stages - 1))


def earliest_ends(schedule, durations):
    """Return the earliest end of each action, by raising the ends until every rule holds.

    The rules are the order of each rank, the results that an action needs, and one message at a
    time per link and direction.
    """
    ends = dict.fromkeys(chain.from_iterable(schedule.ranks), 0.0)
    source = {sent_by(action): action for action in ends}
    arrivals = {}
    before = None
    while before != (ends, arrivals):
        before = (dict(ends), dict(arrivals))
        for order in messages(schedule).values():
            last = 0.0
            for message in order:
                boundary = message.stage - (message.payload is Payload.GRADIENT)
                last = max(last, ends[source[message]]) + durations.send[boundary]
                arrivals[message] = last
        for row in schedule.ranks:
            last = 0.0
            for action in row:
                for need in needed_by(action, stages=schedule.stages):
                    # A stage on the same rank reads the result without a message.
                    crosses = need.stage != action.stage and destination(schedule, need) is not None
                    last = max(last, arrivals[need] if crosses else ends[source[need]])
                last += durations.duration(action)
                ends[action] = last
    return ends


@settings(max_examples=100)
@given(st.data(), schedules)
def test_times_are_the_earliest_possible(data, schedule):
    """Stages differ, and messages take time, in some cases longer than a computation."""
    durations = durations_of(schedule, data)
    timeline = simulate(schedule, durations)
    ends = earliest_ends(schedule, durations)
    for rank, row in enumerate(timeline.ranks):
        expected = []
        for action in schedule.ranks[rank]:
            duration = durations.duration(action)
            expected.append(Span(action, ends[action] - duration, ends[action]))
        assert list(row) == expected
        assert timeline.busy(rank) == sum(map(durations.duration, schedule.ranks[rank]))
    assert timeline.total == max(ends.values())


def test_the_smallest_timeline():
    schedule = make_schedule("1f1b", pp=1, microbatches=1)
    forward = Span(Action(0, Kind.FORWARD, 0), 0, 1)
    backward = Span(Action(0, Kind.BACKWARD, 0), 1, 3)
    assert simulate(schedule, even(schedule)) == Timeline(schedule, ((forward, backward),))
    empty = run(schedule, 0, 0, 0)
    assert empty.total == 0
    assert empty.bubble_overall == 0


def test_wrong_durations_are_refused():
    schedule = make_schedule("1f1b", pp=2, microbatches=2)
    for durations in (
        Durations((1,), (1, 1), (1, 1), (0,)),
        Durations((1, 1), (1, 1), (1, 1), ()),
        Durations((1, -1), (1, 1), (1, 1), (0,)),
        Durations((1, 1), (1, 1), (1, 1), (float("nan"),)),
        Durations((1, 1), (1, float("inf")), (1, 1), (0,)),
    ):
        with pytest.raises(InputError, match="durations"):
            simulate(schedule, durations)
    with pytest.raises(InputError, match="sizes has 1 values"):
        peak_in_flight(schedule, sizes=(1,))


def test_all_schedules_are_covered():
    assert set(SCHEDULES) == {*WAVES, "interleaved-zero-bubble", "zbv", "dualpipev"}
