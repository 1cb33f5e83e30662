"""Tensor parallelism whose sums overlap with products: its numbers, and the order of a step."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from plait.comm.collectives import AsyncAllReduce
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from plait.parallel.tensor.overlap import DeferredGradient
from plait.verify.keep_float64 import keeping_float64
from tests.covers import cover
from tests.parity import cases
from tests.parity.tensor_parallel import FAMILIES, check, plan, settings

CHUNKS = 3


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        *FAMILIES[::2],
        *(pytest.param(kind, marks=pytest.mark.proof) for kind in FAMILIES[1::2]),
    ],
)
def test_families(pool, kind):
    """Lengths are ragged, so that chunks are uneven."""
    config = settings(2, 2, 0, 1, 2, tensor_overlap=CHUNKS, **plan(kind))
    check(pool, 2, kind, kind in ("llama", "gpt2"), config)


@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(stage, marks=pytest.mark.proof) for stage in (1, 2)), 3]
)
def test_with_zero(pool, stage):
    check(pool, 4, "qwen3", True, settings(4, 2, stage, 1, 2, tensor_overlap=CHUNKS))


@pytest.mark.parametrize(
    ("kind", "chunks"), cover([("llama", 1), ("gpt2", 64), ("llama", 64), ("gpt2", 1)], strength=1)
)
def test_four_ways(pool, kind, chunks):
    """Two ranks share a key-value head, widths do not divide, and 64 are more chunks than rows."""
    check(pool, 4, kind, False, settings(4, 4, 0, 1, 1, tensor_overlap=chunks))


def config_with(world, stage, accumulation, **parallel):
    config = settings(world, 2, stage, 1, accumulation, tensor_overlap=CHUNKS)
    config["parallel"] |= parallel
    return config


def train(rank, world, config, frozen):
    """Return the loss and the norm of each step. Runs on every rank.

    Parameters are frozen if their name contains `frozen`.
    """
    model = cases.build("llama", tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    with keeping_float64(model):
        engine = cases.engine(model, config)
        count = config["gradient_accumulation_steps"]
        start = engine.dp_rank * count
        losses_and_norms = []
        for step in cases.steps_for("llama", engine.dp_size * count):
            result = engine.train_batch(step[start : start + count])
            losses_and_norms.append((float(result.loss), float(result.grad_norm)))
    return losses_and_norms


def assert_equals_no_overlap(pool, world, config, frozen=None):
    """Compare with the same layout without overlap, which other tests compare with one process."""
    without = config | {"parallel": {**config["parallel"], "tensor_overlap": 0}}
    actual = pool.run(world, train, config, frozen)[0]
    expected = pool.run(world, train, without, frozen)[0]
    assert actual == [pytest.approx(step, rel=1e-11) for step in expected]
    assert expected[0] != expected[-1]


TECHNIQUES: dict[str, tuple[int, dict[str, Any]]] = {
    "recompute": (2, config_with(2, 0, 2, recompute={"mode": "full"})),
    "selective recompute": (2, config_with(2, 0, 2, recompute={"mode": "selective"})),
    "activation offload": (4, config_with(4, 3, 1)),
    "pipeline": (4, config_with(4, 0, 4, pp=2, dp_replicate=1, pipeline={"schedule": "1f1b"})),
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_with_other_techniques(pool, tmp_path, name):
    world, config = TECHNIQUES[name]
    if name == "activation offload":
        section = {"fraction": 1.0, "device": "disk", "path": str(tmp_path)}
        config["parallel"]["activation_offload"] = section
    assert_equals_no_overlap(pool, world, config)


@pytest.mark.parametrize("frozen", ["q_proj", "down_proj", "embed_tokens", "layers.0."])
def test_frozen_weights(pool, frozen):
    assert_equals_no_overlap(pool, 2, config_with(2, 0, 1), frozen)


def events_of_a_step(rank, world):
    """Return what happens in the forward and in the backward of a step, in order.

    Runs on every rank. The order of asynchronous operations has no public name, so the functions
    that start and await them are patched.
    """
    events: list[str] = []
    model = cases.build("llama", tied=False)
    engine = cases.engine(model, config_with(2, 0, 1))
    batch = cases.steps_for("llama", 1)[0][0]

    def recording(name, function):
        def call(*args, **options):
            events.append(name)
            return function(*args, **options)

        return call

    with ExitStack() as stack:
        for owner, method, name in (
            (AsyncAllReduce, "__init__", "start"),
            (AsyncAllReduce, "value", "wait"),
            (DeferredGradient, "gradient", "weight gradient"),
            (torch, "mm", "product"),
            (dist, "all_reduce", "sum"),
        ):
            patched = recording(name, getattr(owner, method))
            stack.enter_context(patch.object(owner, method, patched))
        output = engine.model(input_ids=batch["input_ids"])
        forward = list(events)
        events.clear()
        output.logits.sum().backward()
    return forward, events


def test_sums_overlap_with_products(pool):
    forward, backward = pool.run(2, events_of_a_step)[0]

    # Each chunk's sum starts before the next chunk's product: two row products in each of 2 blocks.
    row_product = " ".join(["product", "sum"] * CHUNKS)
    assert " ".join(forward).count(row_product) >= 2 * 2

    # Gradients of weights are computed between the start of a sum and the wait for it: those of
    # gate and up, or of queries, keys and values.
    backward = [event for event in backward if event in ("start", "wait", "weight gradient")]
    while backward:
        assert backward[0] == "start"
        wait = backward.index("wait")
        assert backward[1:wait].count("weight gradient") in (2, 3)
        backward = backward[wait + 1 :]


def tensors_alive(rank, world):
    """Return the number of tensors after each step without garbage collection.

    Runs on every rank. A thread of gloo frees the tensors of the last collective a little later, so
    the smallest of several counts is used.
    """
    engine = cases.engine(cases.build("llama", tied=False), config_with(2, 0, 1))
    batch = cases.steps_for("llama", 1)[0][0]
    smallest = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            engine.train_batch(batch)
            counts = []
            for _ in range(10):
                counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
                time.sleep(0.01)
            smallest.append(min(counts))
    finally:
        gc.enable()
    return smallest


def test_a_step_leaves_no_activations(pool):
    _, second, third, fourth = pool.run(2, tensors_alive)[0]
    assert second == third == fourth


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            {"sequence_parallel": True},
            "whose all-gathers and reduce-scatters are not cut into chunks",
        ),
        (
            {"pp": 2, "dp_replicate": 1, "pipeline": {"schedule": "zbv"}},
            "zbv defers the gradients of weights itself",
        ),
    ],
)
def test_combinations_without_a_proof_are_refused(parallel, message):
    with pytest.raises(ConfigError, match=message):
        resolve(load(config_with(4, 0, 4, **parallel)), world_size=4)
