"""Every table is complete and runnable, agrees with torch's, and a spoilt one is found."""

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from plait._torch.pipelining import schedule_actions
from plait.errors import ConfigError, InputError
from plait.parallel.schedules.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Message,
    Payload,
    destination,
    in_order,
    make_schedule,
    messages,
)
from tests.unit.parallel.tables import names, schedules, unhurried
from tests.unit.parallel.waited_for import needed_by, produced_by


def table(schedule):
    return [" ".join(str(action) for action in row) for row in schedule.ranks]


def test_gpipe_and_1f1b_as_published():
    """PipeDream-Flush, figure 4 of arXiv:2104.04473, with 4 micro-batches on 4 ranks."""
    assert table(make_schedule("gpipe", pp=2, microbatches=2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]  # fmt: skip
    assert table(make_schedule("1f1b", pp=4, microbatches=4)) == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
    ]
    single = table(make_schedule("1f1b", pp=4, microbatches=1))
    assert single == [f"{rank}F0 {rank}B0" for rank in range(4)]


@pytest.mark.parametrize(("name", "peer"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 4), (4, 9), (6, 7)])
def test_those_written_here_are_torchs(name, peer, pp, microbatches):
    """torch prints the last rank's micro-batches of 1F1B from 1 on (its runtime does not), so that rank is left out."""
    stage = SimpleNamespace(num_stages=pp, group_size=pp, group_rank=0, submod=None)
    theirs = getattr(torch_schedules, peer)(stage, microbatches)._get_pipeline_order()
    ours = make_schedule(name, pp=pp, microbatches=microbatches)
    for rank in range(pp - 1 if name == "1f1b" else pp):
        actions = [action for action in theirs[rank] if action is not None]
        computed = [str(action) for action in actions if action.is_compute_op]
        assert [str(action) for action in ours.ranks[rank]] == computed


@unhurried
@given(schedules)
def test_every_table_is_complete_and_placed(schedule):
    """Each stage runs each micro-batch forward once and backward once, and is on the rank that the placement promises."""
    for rank, row in enumerate(schedule.ranks):
        stages = schedule.stages_of(rank)
        if SCHEDULES[schedule.name].placement == "v":
            assert stages == (rank, 2 * schedule.pp - 1 - rank)
        else:
            assert stages == tuple(range(rank, schedule.stages, schedule.pp))
        expected = [(stage, m) for stage in stages for m in range(schedule.microbatches)]
        for kinds in ({Kind.FORWARD}, {Kind.BACKWARD, Kind.INPUT}, {Kind.BACKWARD, Kind.WEIGHT}):
            assert sorted((a.stage, a.microbatch) for a in row if a.kind in kinds) == expected
    splits = schedule.name in ("interleaved-zero-bubble", "zbv", "dualpipev")
    assert schedule.splits_backward == SCHEDULES[schedule.name].splits_backward == splits


def stuck(schedule):
    """Whether a rank waits for ever. Every rank is tried again and again, without `in_order`."""
    left = [list(row) for row in schedule.ranks]
    done = set()
    while True:
        moved = False
        for row in left:
            while row and all(need in done for need in needed_by(row[0], stages=schedule.stages)):
                result = produced_by(row.pop(0))
                done |= {result} if result else set()
                moved = True
        if not moved:
            return any(left)


@unhurried
@given(schedules)
def test_order_respects_needs(schedule):
    """`in_order` yields every action once, in each rank's order, after all that it needs."""
    rows = [[] for _ in schedule.ranks]
    done = set()
    for rank, action in in_order(schedule):
        assert all(need in done for need in needed_by(action, stages=schedule.stages))
        rows[rank].append(action)
        result = produced_by(action)
        done |= {result} if result else set()
    assert tuple(tuple(row) for row in rows) == schedule.ranks


def changed(schedule, rank, row):
    ranks = (*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
    return replace(schedule, ranks=ranks)


@settings(max_examples=300, deadline=None)
@given(st.data(), schedules)
def test_a_spoilt_table_is_found(data, schedule):
    """An action is lost, doubled, or on another rank; has another micro-batch, stage or kind; or a backward precedes its forward."""
    rank = data.draw(st.integers(0, schedule.pp - 1))
    row = list(schedule.ranks[rank])
    at = data.draw(st.integers(0, len(row) - 1))
    action = row[at]
    hows = ["lost", "doubled", "moved", "microbatch", "stage", "kind", "early"]
    how = data.draw(st.sampled_from(hows))
    spoilt = schedule
    if how == "lost":
        del row[at]
    elif how == "doubled":
        row.append(action)
    elif how == "moved":
        other = (rank + 1) % (schedule.pp + 1)
        if other == schedule.pp:
            spoilt = replace(schedule, ranks=(*schedule.ranks, (action,)))
        else:
            del row[at]
            spoilt = changed(schedule, other, [*schedule.ranks[other], action])
    elif how in ("microbatch", "stage"):
        delta = data.draw(st.sampled_from([-1, 1]))
        row[at] = replace(action, **{how: getattr(action, how) + delta})
    elif how == "kind":
        kinds = [kind for kind in Kind if kind is not action.kind]
        row[at] = replace(action, kind=data.draw(st.sampled_from(kinds)))
    else:
        forward = Action(action.stage, Kind.FORWARD, action.microbatch)
        kinds = [Kind.BACKWARD, Kind.INPUT]
        same = [a for a in row if (a.stage, a.microbatch) == (action.stage, action.microbatch)]
        back = next(a for a in same if a.kind in kinds)
        row.remove(back)
        row.insert(row.index(forward), back)
    spoilt = changed(spoilt, rank, row)
    with pytest.raises(InputError):
        spoilt.check()


@settings(max_examples=300, deadline=None)
@given(st.data(), schedules)
def test_a_deadlock_is_found(data, schedule):
    """Two actions of a rank are exchanged. The table is refused exactly where a rank then waits for ever."""
    rank = data.draw(st.integers(0, schedule.pp - 1))
    row = list(schedule.ranks[rank])
    one, two = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[one], row[two] = row[two], row[one]
    mixed = changed(schedule, rank, row)
    words = f"pp {schedule.pp} and {schedule.microbatches} micro-batches: ranks deadlock: rank "
    with pytest.raises(InputError, match=words) if stuck(mixed) else nullcontext():
        mixed.check()


def test_a_deadlock_names_who_waits():
    """Rank 0 waits for a gradient before it has sent the activation that the gradient comes from."""
    schedule = make_schedule("1f1b", pp=2, microbatches=2)
    order = [(Kind.FORWARD, 0), (Kind.BACKWARD, 0), (Kind.BACKWARD, 1), (Kind.FORWARD, 1)]
    with pytest.raises(InputError) as caught:
        changed(schedule, 0, [Action(0, kind, microbatch) for kind, microbatch in order]).check()
    for waits in ("rank 0 at 0B1", "rank 1 at 1F1"):
        words = f"{waits} for the activation of stage 0 for micro-batch 1"
        assert words in str(caught.value)


def test_shapes_of_a_table():
    schedule = make_schedule("gpipe", pp=2, microbatches=2)
    for change in ({"pp": 3}, {"stage_ranks": (0, 2)}, {"microbatches": 3}):
        with pytest.raises(InputError):
            replace(schedule, **change).check()


@unhurried
@given(schedules)
def test_messages(schedule):
    """Each boundary between ranks passes each micro-batch once per direction, in the order of the source. Only neighbours communicate."""
    pairs = messages(schedule)
    ranks = schedule.stage_ranks
    expected = set()
    for stage in range(schedule.stages - 1):
        if ranks[stage] != ranks[stage + 1]:
            for m in range(schedule.microbatches):
                expected.add(Message(Payload.ACTIVATION, stage, m))
                expected.add(Message(Payload.GRADIENT, stage + 1, m))
    everything = [message for order in pairs.values() for message in order]
    assert len(everything) == len(expected) and set(everything) == expected
    for (source, target), order in pairs.items():
        row = [produced_by(action) for action in schedule.ranks[source]]
        assert list(order) == [message for message in row if message in order]
        for message in order:
            reader = message.stage + (1 if message.payload is Payload.ACTIVATION else -1)
            assert ranks[message.stage] == source
            assert ranks[reader] == target == destination(schedule, message)


def test_a_v_passes_nothing_at_its_turn():
    """Stages pp - 1 and pp are on the last rank; both directions use the same pair of ranks."""
    pairs = messages(make_schedule("zbv", pp=2, microbatches=1))
    assert {pair: [str(message) for message in order] for pair, order in pairs.items()} == {
        (0, 1): [f"the {what} for micro-batch 0" for what in ("activation of stage 0", "gradient of stage 3")],
        (1, 0): [f"the {what} for micro-batch 0" for what in ("activation of stage 2", "gradient of stage 1")],
    }  # fmt: skip
    assert messages(make_schedule("zbv", pp=1, microbatches=3)) == {}


@unhurried
@given(names, st.integers(1, 8), st.integers(1, 40))
def test_refused_numbers(name, pp, microbatches):
    """Torch refuses these numbers too, and every number that the remedy names works."""
    try:
        make_schedule(name, pp=pp, microbatches=microbatches)
    except ConfigError as refused:
        problem = refused.problems[0]
        assert problem.field == "gradient_accumulation_steps" and problem.value == microbatches
        generator = SCHEDULES[name].generator
        with pytest.raises(ValueError, match="microbatch"):
            schedule_actions(generator, pp=pp, stages_per_rank=2, microbatches=microbatches)
        remedies = [
            int(word) for word in problem.remedy.replace(",", " ").split() if word.isdigit()
        ]
        assert remedies
        for count in remedies:
            assert make_schedule(name, pp=pp, microbatches=count).microbatches == count
        if "or more" not in problem.remedy:
            low, high = remedies
            assert low < microbatches < high


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "1F1B", "pp": 2, "microbatches": 2}, "parallel.pipeline.schedule = '1F1B': is not a pipeline schedule that Plait runs"),
        ({"name": "1F1B", "pp": 2, "microbatches": 2}, "did you mean `1f1b`?"),
        ({"name": "?", "pp": 2, "microbatches": 2}, "known are 1f1b, dualpipev"),
        ({"name": "1f1b", "pp": 0, "microbatches": 2}, "parallel.pp = 0"),
        ({"name": "1f1b", "pp": 2, "microbatches": 0}, "gradient_accumulation_steps = 0"),
        ({"name": "1f1b", "pp": 2, "microbatches": 4, "stages_per_rank": 2}, "1f1b has exactly 1 on a rank; use 1, or one of interleaved-1f1b"),
        ({"name": "zbv", "pp": 2, "microbatches": 4, "stages_per_rank": 3}, "parallel.pipeline.stages_per_rank = 3: zbv has exactly 2"),
        ({"name": "interleaved-1f1b", "pp": 2, "microbatches": 4, "stages_per_rank": 1}, "at least 2 on a rank; use 2 or more, or one of gpipe"),
        ({"name": "interleaved-1f1b", "pp": 4, "microbatches": 11}, "takes micro-batches in 11 // 4 = 2 equal rounds, and 11 % 2 != 0; use 10 or 12"),
        ({"name": "dualpipev", "pp": 4, "microbatches": 7}, "dualpipev with pp 4 has 8 stages and needs as many micro-batches; use 8 or more"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_schedule(**arguments)
