"""A run measures the links of its own group when it starts, keeps them, and measures again when they are others."""

import json
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
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

WAYS = ("all-reduce", "reduce-scatter+all-gather", "recursive-doubling", "ring")


def config_of(**parallel):
    config = settings(2, 0, 1, 1)
    config["parallel"] |= {"transport": "torch", "measure_seconds": 0.2, **parallel}
    return config


def links_with(cheap, *, times_as_slow=1.0):
    costs = {
        way: Cost(1e-4 * times_as_slow, (1e-9 if way == cheap else 1e-7) * times_as_slow)
        for way in WAYS
    }
    return GroupLinks("dp_replicate", 1, 2, Level(2, costs))


@contextmanager
def instead_of_measuring(links, agreement):
    with patch.object(measure, "AGREEMENT", agreement or measure.AGREEMENT):
        if links is None:
            yield
            return
        with patch.object(measure, "measure_algorithms", lambda *args, **options: links):
            yield


def started(rank, world, config, kept=None, planted=None, agreement=None):
    """(what is said, bytes of a bucket, loss of a step). Runs in a worker."""
    resolved = resolve(load_config(config), world_size=world, micro_batch_size=1)
    data = resolved.data_parallel.model_copy(update={"kept_links": str(kept) if kept else None})
    with instead_of_measuring(planted[rank] if planted else None, agreement):
        engine = cases.engine(
            cases.build("plain", tied=False), resolved.model_copy(update={"data_parallel": data})
        )
    assert engine.hooks.find(Reducer) is not None
    loss = float(engine.train_batch(cases.steps_for("plain", world)[0][rank]))
    return engine.communication, engine.hooks.find(Reducer).bucket_bytes, loss


def test_a_start_measures_decides_alike_and_keeps(pool, tmp_path):
    kept = tmp_path / "run" / "links.json"
    plain = pool.run(2, started, config_of(measure_seconds=0))
    assert "by torch: set in the configuration" in plain[0][0]
    assert plain[0][1] == 25 * MIB
    results = pool.run(2, started, config_of(), kept)
    assert results[0] == results[1]
    said, bucket_bytes, loss = results[0]
    assert "The links were measured at the start in" in said
    assert bucket_bytes < 25 * MIB, "no bucket is larger than the gradients of this model"
    assert loss == pytest.approx(plain[0][2], rel=1e-12)
    group, facts = load_with_facts(kept)
    assert set(group["dp_replicate"].whole.costs) == set(WAYS)
    assert len(facts["hosts"]) == 2
    assert facts["device"] == "cpu"


def test_the_next_start_uses_the_stored_choice_if_a_probe_agrees(pool, tmp_path):
    kept = tmp_path / "links.json"
    pool.run(2, started, config_of(), kept, (links_with("ring"),) * 2)
    results = pool.run(2, started, config_of(), kept, (links_with("recursive-doubling"),) * 2, 1e9)
    assert all("reduced by ring" in said and "and a probe agrees" in said for said, *_ in results)


def test_links_that_became_others_are_measured_again(pool, tmp_path):
    """A probe of these processes takes microseconds to milliseconds; what was kept says hours."""
    kept = tmp_path / "links.json"
    pool.run(2, started, config_of(), kept, (links_with("ring", times_as_slow=1e8),) * 2)
    results = pool.run(2, started, config_of(), kept, (links_with("recursive-doubling"),) * 2)
    assert all(
        "reduced by recursive-doubling" in said and "because a probe took" in said
        for said, *_ in results
    )
    assert load_with_facts(kept)[0]["dp_replicate"] == links_with("recursive-doubling")


@pytest.mark.parametrize("change", ["hosts", "file"])
def test_a_file_of_other_machines_is_not_believed(pool, tmp_path, change):
    kept = tmp_path / "links.json"
    pool.run(2, started, config_of(), kept, (links_with("ring"),) * 2)
    content = json.loads(kept.read_text())
    content["facts"]["hosts"] = ["elsewhere", "elsewhere"]
    kept.write_text(json.dumps(content) if change == "hosts" else "{")
    results = pool.run(2, started, config_of(), kept, (links_with("recursive-doubling"),) * 2, 1e9)
    why = "machines differ" if change == "hosts" else "cannot be read"
    assert all("reduced by recursive-doubling" in said and why in said for said, *_ in results)


def test_ranks_that_measured_differently_decide_alike(pool):
    """Or they would wait for each other for ever."""
    results = pool.run(
        2, started, config_of(), None, (links_with("ring"), links_with("recursive-doubling"))
    )
    assert all("reduced by ring" in said for said, *_ in results)
    assert results[0] == results[1]


def settled(rank, world, config, fast):
    """The links say that all ways are about as good; one is, and the others take 3 ms more. Runs in a worker."""
    links = GroupLinks(
        "dp_replicate",
        1,
        2,
        Level(2, {way: Cost(1e-4, 1e-9 * (1 + 0.1 * n)) for n, way in enumerate(WAYS)}),
    )
    honest, clock = measure.all_reduce_operations, Clock()

    def later(operation):
        clock.sleep(0.003)
        operation()

    def ways_of(*args, **options):
        of = honest(*args, **options)
        return lambda nbytes: {
            way: op if way == fast else partial(later, op) for way, op in of(nbytes).items()
        }

    began = clock.now
    # The clock of rank 1 runs ahead.
    ahead = SimpleNamespace(
        perf_counter=lambda: began + (clock.perf_counter() - began) * (1 + 50 * rank)
    )
    with (
        patch.object(measure, "all_reduce_operations", ways_of),
        patch.object(measure, "time", ahead),
    ):
        return started(rank, world, config, None, (links,) * 2)[0]


@pytest.mark.parametrize("fast", WAYS)
def test_the_choice_is_made_at_the_runs_message_sizes(pool, fast):
    said, other = pool.run(2, settled, config_of(), fast)
    assert f"gradients are reduced by {fast}" in said
    assert "4 algorithms were timed in turn with messages of" in said
    assert said == other


def no_measuring(rank, world, config):
    """Runs in a worker."""
    with patch.object(data_collectives, "find_links", side_effect=AssertionError("measured")):
        return started(rank, world, config)[0]


def test_nothing_is_measured_where_memory_is_shared(pool):
    said = pool.run(2, no_measuring, config_of(transport="auto"))[0]
    assert "the links were not measured, because shared memory is faster" in said
    assert "set in the configuration" in pool.run(2, no_measuring, config_of(all_reduce="ring"))[0]


def slow_rank(rank, world):
    """A link on which every call of rank 1 is late by 30 ms. Runs in a worker."""
    honest = dist.all_reduce

    def late(*args, **options):
        time.sleep(0.03 * rank)
        return honest(*args, **options)

    import torch

    with patch.object(dist, "all_reduce", late):
        found = measure.find_links(
            "dp_replicate", dist.group.WORLD, None, device=torch.device("cpu"), seconds=1.0
        )
    return found.links.whole.costs["all-reduce"].seconds(MIB)


def test_a_slow_link_is_seen_by_every_rank(pool):
    assert all(seconds > 0.03 for seconds in pool.run(2, slow_rank))
