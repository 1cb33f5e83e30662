"""A run measures its links at the start, stores them, and measures changed links again."""

import json
import time
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from plait.comm import measure
from plait.comm.choose import Cost, GroupLinks, Level, load_with_facts
from plait.config.resolving.resolve import load as load_config
from plait.config.resolving.resolve import resolve
from plait.parallel.data.reducer import Reducer
from plait.parallel.techniques import data_collectives
from plait.sizes import MIB
from tests.clock import Clock
from tests.parity import cases
from tests.parity.data_parallel import settings

ALGORITHMS = ("all-reduce", "reduce-scatter+all-gather", "recursive-doubling", "ring")
ANY_TIME = 1e9
"""Ratio of probe and stored time up to which a probe agrees, if no real time may matter."""


def config_of(**parallel):
    config = settings(2, 0, 1, 1)
    config["parallel"] |= {"transport": "torch", "measure_seconds": 0.2, **parallel}
    return config


def links_with(fastest, *, slowdown=1.0):
    """Links on which one algorithm is faster than the others."""
    costs = {}
    for algorithm in ALGORITHMS:
        seconds_per_byte = 1e-9 if algorithm == fastest else 1e-7
        costs[algorithm] = Cost(1e-4 * slowdown, seconds_per_byte * slowdown)
    return GroupLinks("dp_replicate", 1, 2, Level(2, costs))


def start(rank, world, config, stored=None, measured=None, agreement=None):
    """Start a run. Runs on every rank.

    Args:
        stored: File of links that an earlier run has measured.
        measured: Links per rank instead of a measurement.
        agreement: Ratio up to which a probe agrees with stored links.

    Returns:
        The description of the communication, bytes of a bucket, and the loss of a step.
    """
    resolved = resolve(load_config(config), world_size=world, micro_batch_size=1)
    path = str(stored) if stored else None
    data = resolved.data_parallel.model_copy(update={"kept_links": path})
    resolved = resolved.model_copy(update={"data_parallel": data})
    with ExitStack() as stack:
        if agreement is not None:
            stack.enter_context(patch.object(measure, "AGREEMENT", agreement))
        if measured is not None:
            links = measured[rank]
            stack.enter_context(patch.object(measure, "measure_algorithms", lambda *_, **__: links))
        engine = cases.engine(cases.build("plain", tied=False), resolved)
    loss = float(engine.train_batch(cases.steps_for("plain", world)[0][rank]))
    return engine.communication, engine.hooks.find(Reducer).bucket_bytes, loss


def check_communication(results, *fragments):
    for communication, _, _ in results:
        for fragment in fragments:
            assert fragment in communication


def test_a_start_measures_decides_alike_and_stores(pool, tmp_path):
    stored = tmp_path / "run" / "links.json"
    unmeasured = pool.run(2, start, config_of(measure_seconds=0))
    check_communication(unmeasured, "by torch: set in the configuration")
    _, default_bytes, expected_loss = unmeasured[0]
    assert default_bytes == 25 * MIB

    results = pool.run(2, start, config_of(), stored)
    assert results[0] == results[1]
    check_communication(results, "The links were measured at the start in")
    _, bucket_bytes, loss = results[0]
    assert bucket_bytes < 25 * MIB, "no bucket is larger than the gradients of this model"
    assert loss == pytest.approx(expected_loss, rel=1e-12)

    groups, facts = load_with_facts(stored)
    assert set(groups["dp_replicate"].whole.costs) == set(ALGORITHMS)
    assert len(facts["hosts"]) == 2
    assert facts["device"] == "cpu"


RING = (links_with("ring"),) * 2
DOUBLING = (links_with("recursive-doubling"),) * 2


def test_the_next_start_uses_stored_links_if_a_probe_agrees(pool, tmp_path):
    stored = tmp_path / "links.json"
    pool.run(2, start, config_of(), stored, RING)
    results = pool.run(2, start, config_of(), stored, DOUBLING, ANY_TIME)
    check_communication(results, "reduced by ring", "and a probe agrees")


def test_links_that_have_changed_are_measured_again(pool, tmp_path):
    """A probe of these processes takes at most milliseconds. The stored links say hours."""
    stored = tmp_path / "links.json"
    slow = (links_with("ring", slowdown=1e8),) * 2
    pool.run(2, start, config_of(), stored, slow)
    results = pool.run(2, start, config_of(), stored, DOUBLING)
    check_communication(results, "reduced by recursive-doubling", "because a probe took")
    assert load_with_facts(stored)[0]["dp_replicate"] == DOUBLING[0]


@pytest.mark.parametrize(
    ("change", "reason"), [("hosts", "machines differ"), ("file", "cannot be read")]
)
def test_a_file_of_other_machines_is_not_used(pool, tmp_path, change, reason):
    stored = tmp_path / "links.json"
    pool.run(2, start, config_of(), stored, RING)
    content = json.loads(stored.read_text())
    content["facts"]["hosts"] = ["another", "another"]
    stored.write_text(json.dumps(content) if change == "hosts" else "{")
    results = pool.run(2, start, config_of(), stored, DOUBLING, ANY_TIME)
    check_communication(results, "reduced by recursive-doubling", reason)


def test_ranks_that_measured_differently_decide_alike(pool):
    """Otherwise they would wait for each other forever."""
    results = pool.run(2, start, config_of(), None, (RING[0], DOUBLING[0]))
    check_communication(results, "reduced by ring", "2 ranks on 1 machine")
    assert results[0] == results[1]


def start_with_similar_links(rank, world, config, fastest):
    """Measure similar costs of all algorithms, of which all but one take 3 ms longer.

    Runs on every rank. Time passes on a simulated clock.
    """
    costs = {}
    for index, algorithm in enumerate(ALGORITHMS):
        costs[algorithm] = Cost(1e-4, 1e-9 * (1 + 0.1 * index))
    links = GroupLinks("dp_replicate", 1, 2, Level(2, costs))
    all_reduce_operations = measure.all_reduce_operations
    clock = Clock()

    def delayed(operation):
        clock.sleep(0.003)
        operation()

    def delayed_operations(*args, **options):
        operations_for = all_reduce_operations(*args, **options)

        def operations(nbytes):
            delayed_by_name = {}
            for name, operation in operations_for(nbytes).items():
                is_fastest = name == fastest
                delayed_by_name[name] = operation if is_fastest else partial(delayed, operation)
            return delayed_by_name

        return operations

    begin = clock.now
    # The clock of rank 1 is faster, so that ranks measure different times.
    time_module = SimpleNamespace(
        perf_counter=lambda: begin + (clock.perf_counter() - begin) * (1 + 50 * rank)
    )
    with (
        patch.object(measure, "all_reduce_operations", delayed_operations),
        patch.object(measure, "time", time_module),
    ):
        return start(rank, world, config, None, (links, links))


@pytest.mark.parametrize("fastest", ALGORITHMS)
def test_similar_algorithms_are_timed_with_the_runs_messages(pool, fastest):
    results = pool.run(2, start_with_similar_links, config_of(), fastest)
    check_communication(
        results,
        f"gradients are reduced by {fastest}",
        "4 algorithms were timed in turn with messages of",
    )
    assert results[0][0] == results[1][0]


def start_without_measurement(rank, world, config):
    """Fail if anything is measured. Runs on every rank."""
    with patch.object(data_collectives, "find_links", side_effect=AssertionError("measured")):
        return start(rank, world, config)


def test_nothing_is_measured_if_nothing_can_be_chosen(pool):
    shared = pool.run(2, start_without_measurement, config_of(transport="auto"))
    check_communication(shared, "the links were not measured, because shared memory is faster")
    fixed = pool.run(2, start_without_measurement, config_of(all_reduce="ring"))
    check_communication(fixed, "set in the configuration")


def measure_slow_link(rank, world):
    """Measure a link on which every call of rank 1 is late by 30 ms. Runs on every rank."""
    all_reduce = dist.all_reduce

    def late(*args, **options):
        time.sleep(0.03 * rank)
        return all_reduce(*args, **options)

    with patch.object(dist, "all_reduce", late):
        measurement = measure.find_links(
            "dp_replicate", dist.group.WORLD, None, device=torch.device("cpu"), seconds=1.0
        )
    return measurement.links.whole.costs["all-reduce"].seconds(MIB)


def test_a_slow_link_is_measured_by_every_rank(pool):
    assert all(seconds > 0.03 for seconds in pool.run(2, measure_slow_link))
