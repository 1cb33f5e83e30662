"""Tables of schedules are complete and free of deadlocks, and wrong ones are refused."""

import re
from dataclasses import replace
from itertools import chain
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
from tests.unit.parallel.tables import names, needed_by, schedules, sent_by


def table(schedule):
    return [" ".join(str(action) for action in row) for row in schedule.ranks]


def test_gpipe_and_1f1b_as_published():
    """1F1B is figure 4 of arXiv:2104.04473 (PipeDream-Flush)."""
    gpipe = table(make_schedule("gpipe", pp=2, microbatches=2))
    assert gpipe == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
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
def test_gpipe_and_1f1b_equal_torch(name, peer, pp, microbatches):
    # torch's list for the last rank of 1F1B counts micro-batches from 1, unlike its runtime.
    ranks = pp - 1 if name == "1f1b" else pp
    stage = SimpleNamespace(num_stages=pp, group_size=pp, group_rank=0, submod=None)
    reference = getattr(torch_schedules, peer)(stage, microbatches)._get_pipeline_order()
    schedule = make_schedule(name, pp=pp, microbatches=microbatches)
    for rank, row in enumerate(table(schedule)[:ranks]):
        assert row.split() == [
            str(action) for action in reference[rank] if action and action.is_compute_op
        ]


@given(schedules)
def test_every_table_is_complete(schedule):
    """Each stage runs each micro-batch forward once and backward once, on the expected rank."""
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


def deadlocks(schedule):
    """Return whether a rank waits forever. Every rank is tried repeatedly, without `in_order`."""
    remaining = [list(row) for row in schedule.ranks]
    sent = set()
    progress = True
    while progress:
        progress = False
        for row in remaining:
            while row and sent.issuperset(needed_by(row[0], stages=schedule.stages)):
                sent.add(sent_by(row.pop(0)))
                progress = True
    return any(remaining)


@given(schedules)
def test_in_order_respects_dependencies(schedule):
    """`in_order` yields every action once, in each rank's order, after all that it needs."""
    rows = [[] for _ in schedule.ranks]
    sent = set()
    for rank, action in in_order(schedule):
        assert sent.issuperset(needed_by(action, stages=schedule.stages))
        rows[rank].append(action)
        sent.add(sent_by(action))
    assert tuple(map(tuple, rows)) == schedule.ranks


def changed(schedule, rank, row):
    ranks = (*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
    return replace(schedule, ranks=ranks)


@settings(max_examples=300)
@given(st.data(), schedules)
def test_a_wrong_table_is_refused(data, schedule):
    """An action is missing, repeated, changed or on another rank, or a backward is too early."""
    rank = data.draw(st.integers(0, schedule.pp - 1))
    row = list(schedule.ranks[rank])
    position = data.draw(st.integers(0, len(row) - 1))
    action = row[position]
    changes = ["missing", "repeated", "moved", "microbatch", "stage", "kind", "early"]
    change = data.draw(st.sampled_from(changes))
    wrong = schedule
    if change == "missing":
        del row[position]
    elif change == "repeated":
        row.append(action)
    elif change == "moved":
        target = (rank + 1) % (schedule.pp + 1)
        if target == schedule.pp:
            wrong = replace(schedule, ranks=(*schedule.ranks, (action,)))
        else:
            del row[position]
            wrong = changed(schedule, target, [*schedule.ranks[target], action])
    elif change in ("microbatch", "stage"):
        delta = data.draw(st.sampled_from([-1, 1]))
        row[position] = replace(action, **{change: getattr(action, change) + delta})
    elif change == "kind":
        kinds = [kind for kind in Kind if kind is not action.kind]
        row[position] = replace(action, kind=data.draw(st.sampled_from(kinds)))
    else:
        forward = replace(action, kind=Kind.FORWARD)
        backwards = [replace(action, kind=kind) for kind in (Kind.BACKWARD, Kind.INPUT)]
        backward = next(each for each in row if each in backwards)
        row.remove(backward)
        row.insert(row.index(forward), backward)
    with pytest.raises(InputError):
        changed(wrong, rank, row).check()


@settings(max_examples=300)
@given(st.data(), schedules)
def test_deadlocks_are_refused(data, schedule):
    """Exchanging two actions of a rank is refused only if a rank would wait forever."""
    rank = data.draw(st.integers(0, schedule.pp - 1))
    row = list(schedule.ranks[rank])
    first, second = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[first], row[second] = row[second], row[first]
    exchanged = changed(schedule, rank, row)
    if not deadlocks(exchanged):
        exchanged.check()
        return
    message = f"pp {schedule.pp} and {schedule.microbatches} micro-batches: ranks deadlock: rank "
    with pytest.raises(InputError, match=message):
        exchanged.check()


def test_a_deadlock_names_the_waiting_ranks():
    """Rank 0 waits for the gradient of an activation that it has not sent."""
    schedule = make_schedule("1f1b", pp=2, microbatches=2)
    order = [(Kind.FORWARD, 0), (Kind.BACKWARD, 0), (Kind.BACKWARD, 1), (Kind.FORWARD, 1)]
    row = [Action(0, kind, microbatch) for kind, microbatch in order]
    with pytest.raises(InputError) as error:
        changed(schedule, 0, row).check()
    for action in ("rank 0 at 0B1", "rank 1 at 1F1"):
        message = f"{action} for the activation of stage 0 for micro-batch 1"
        assert message in str(error.value)


def test_a_table_with_other_numbers_is_refused():
    schedule = make_schedule("gpipe", pp=2, microbatches=2)
    for change in ({"pp": 3}, {"stage_ranks": (0, 2)}, {"microbatches": 3}):
        with pytest.raises(InputError):
            replace(schedule, **change).check()


@given(schedules)
def test_messages(schedule):
    """Neighbours exchange each micro-batch once per direction, in the order of the source."""
    pairs = messages(schedule)
    ranks = schedule.stage_ranks
    expected = set()
    for stage in range(schedule.stages - 1):
        if ranks[stage] != ranks[stage + 1]:
            for m in range(schedule.microbatches):
                expected.add(Message(Payload.ACTIVATION, stage, m))
                expected.add(Message(Payload.GRADIENT, stage + 1, m))
    everything = list(chain.from_iterable(pairs.values()))
    assert len(everything) == len(expected)
    assert set(everything) == expected

    for (source, target), order in pairs.items():
        sent = map(sent_by, schedule.ranks[source])
        assert list(order) == [message for message in sent if message in order]
        for message in order:
            reader = message.stage + (1 if message.payload is Payload.ACTIVATION else -1)
            assert ranks[message.stage] == source
            assert ranks[reader] == target == destination(schedule, message)


def test_a_v_sends_nothing_at_its_turn():
    """Stages pp - 1 and pp are on the last rank. Both directions use the same pair of ranks."""
    pairs = messages(make_schedule("zbv", pp=2, microbatches=1))
    assert {pair: list(order) for pair, order in pairs.items()} == {
        (0, 1): [Message(Payload.ACTIVATION, 0, 0), Message(Payload.GRADIENT, 3, 0)],
        (1, 0): [Message(Payload.ACTIVATION, 2, 0), Message(Payload.GRADIENT, 1, 0)],
    }
    assert messages(make_schedule("zbv", pp=1, microbatches=3)) == {}


@given(names, st.integers(1, 8), st.integers(1, 40))
def test_refused_numbers_of_micro_batches(name, pp, microbatches):
    """torch refuses these numbers too, and every number that the remedy names works."""
    try:
        make_schedule(name, pp=pp, microbatches=microbatches)
        return
    except ConfigError as error:
        problem = error.problems[0]
    assert problem.field == "gradient_accumulation_steps"
    assert problem.value == microbatches
    generator = SCHEDULES[name].generator
    with pytest.raises(ValueError, match="microbatch"):
        schedule_actions(generator, pp=pp, stages_per_rank=2, microbatches=microbatches)

    remedies = [int(number) for number in re.findall(r"\b\d+\b", problem.remedy)]
    assert remedies
    for count in remedies:
        assert make_schedule(name, pp=pp, microbatches=count).microbatches == count
    if "or more" not in problem.remedy:
        low, high = remedies
        assert low < microbatches < high


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "stages_per_rank", "message"),
    [
        ("1F1B", 2, 2, None, "schedule = '1F1B': is not a pipeline .*did you mean `1f1b`"),
        ("?", 2, 2, None, "known are 1f1b, dualpipev"),
        ("1f1b", 0, 2, None, "parallel.pp = 0"),
        ("1f1b", 2, 0, None, "gradient_accumulation_steps = 0"),
        ("1f1b", 2, 4, 2, "1f1b has exactly 1 on a rank; use 1, or one of interleaved-1f1b"),
        ("zbv", 2, 4, 3, "parallel.pipeline.stages_per_rank = 3: zbv has exactly 2"),
        ("interleaved-1f1b", 2, 4, 1, "at least 2 on a rank; use 2 or more, or one of gpipe"),
        (
            "interleaved-1f1b",
            4,
            11,
            None,
            "11 // 4 = 2 equal rounds, and 11 % 2 != 0; use 10 or 12",
        ),
        ("dualpipev", 4, 7, None, "8 stages and needs as many micro-batches; use 8 or more"),
    ],
)
def test_wrong_arguments(name, pp, microbatches, stages_per_rank, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(name, pp=pp, microbatches=microbatches, stages_per_rank=stages_per_rank)
