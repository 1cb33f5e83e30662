"""Tensor parallelism whose sums are hidden behind products: the numbers of one process, and in fact beside the products."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import plait
from plait.comm.collectives import AsyncAllReduce
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from plait.parallel.tensor.overlap import DeferredGradient
from plait.verify.keep_float64 import keeping_float64
from tests.covers import cover
from tests.parity import cases
from tests.parity.tensor_parallel import FAMILIES, check, plan, settings

PIECES = 3


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        *(
            pytest.param(kind, marks=[pytest.mark.proof] if at % 2 else [])
            for at, kind in enumerate(FAMILIES)
        ),
    ],
)
def test_families(pool, kind):
    """tp 2, accumulation; ragged lengths, so that pieces are uneven."""
    check(
        pool,
        2,
        kind,
        kind in ("llama", "gpt2"),
        settings(2, 2, 0, 1, 2, tensor_overlap=PIECES, **plan(kind)),
    )


@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(stage, marks=pytest.mark.proof) for stage in (1, 2)), 3]
)
def test_with_zero(pool, stage):
    """tp 2 x dp 2, accumulation."""
    check(pool, 4, "qwen3", True, settings(4, 2, stage, 1, 2, tensor_overlap=PIECES))


@pytest.mark.parametrize(
    ("kind", "pieces"), cover([("llama", 1), ("gpt2", 64), ("llama", 64), ("gpt2", 1)], strength=1)
)
def test_four_ways(pool, kind, pieces):
    """One key-value head for two ranks, widths that do not divide; one piece, and more pieces than rows."""
    check(pool, 4, kind, False, settings(4, 4, 0, 1, 1, tensor_overlap=pieces))


def pipelined():
    config = settings(4, 2, 0, 1, 4, tensor_overlap=PIECES, pp=2)
    config["parallel"] |= {"dp_replicate": 1, "pipeline": {"schedule": "1f1b"}}
    return config


MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "recompute": (2, settings(2, 2, 0, 1, 2, tensor_overlap=PIECES, recompute={"mode": "full"})),
    "selective recompute": (
        2,
        settings(2, 2, 0, 1, 2, tensor_overlap=PIECES, recompute={"mode": "selective"}),
    ),
    "activation offload": (
        4,
        settings(
            4,
            2,
            3,
            1,
            1,
            tensor_overlap=PIECES,
            activation_offload={"fraction": 1.0, "device": "disk"},
        ),
    ),
    "pipeline": (4, pipelined()),
}


def trained(rank, world, config, frozen):
    """(loss, norm) of three steps. Runs in a worker."""
    model = cases.build("llama", tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    with keeping_float64(model):
        engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
        micro = config["gradient_accumulation_steps"]
        mine = slice(engine.dp_rank * micro, (engine.dp_rank + 1) * micro)
        results = [
            engine.train_batch(step[mine])
            for step in cases.steps_for("llama", engine.dp_size * micro)
        ]
    return [(float(result.loss), float(result.grad_norm)) for result in results]


def without(config):
    return config | {"parallel": {**config["parallel"], "tensor_overlap": 0}}


@pytest.mark.parametrize("name", MORE)
def test_beside_other_techniques(pool, tmp_path, name):
    """The same as without, which is proven against one process elsewhere."""
    world, config = MORE[name]
    if "activation_offload" in config["parallel"]:
        config["parallel"]["activation_offload"]["path"] = str(tmp_path)
    found, wanted = (
        pool.run(world, trained, config, ""),
        pool.run(world, trained, without(config), ""),
    )
    assert found[0] == [pytest.approx(step, rel=1e-11) for step in wanted[0]]
    assert wanted[0][0] != wanted[0][-1]


@pytest.mark.parametrize("frozen", ["q_proj", "down_proj", "embed_tokens", "layers.0."])
def test_weights_that_are_not_trained(pool, frozen):
    config = settings(2, 2, 0, 1, 1, tensor_overlap=PIECES)
    found, wanted = (
        pool.run(2, trained, config, frozen),
        pool.run(2, trained, without(config), frozen),
    )
    assert found[0] == [pytest.approx(step, rel=1e-11) for step in wanted[0]]


def order(rank, world, pieces):
    """What happens in the forward and the backward of a step, in order. Runs in a worker."""
    happened: list[str] = []
    config = settings(2, 2, 0, 1, 1, tensor_overlap=pieces)
    model = cases.build("llama", tied=False)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    batch = cases.steps_for("llama", 1)[0][0]

    def noting(name, honest):
        def noted(*args, **options):
            happened.append(name)
            return honest(*args, **options)

        return noted

    with ExitStack() as stack:
        for owner, method, name in (
            (AsyncAllReduce, "__init__", "start"),
            (AsyncAllReduce, "value", "wait"),
            (DeferredGradient, "gradient", "weight"),
            (torch, "mm", "piece"),
            (dist, "all_reduce", "sum"),
        ):
            stack.enter_context(patch.object(owner, method, noting(name, getattr(owner, method))))
        output = engine.model(input_ids=batch["input_ids"])
        forward = list(happened)
        happened.clear()
        output.logits.sum().backward()
    return forward, happened


def test_sums_are_beside_products(pool):
    forward, backward = pool.run(2, order, PIECES)[0]
    blocks = 2
    row_products = ["piece", "sum"] * PIECES
    joined = " ".join(forward)
    assert joined.count(" ".join(row_products)) >= 2 * blocks, (
        "every piece is under way before the next is computed"
    )
    backward = [event for event in backward if event in ("start", "wait", "weight")]
    while backward:  # of every door: gate and up, or q, k and v
        started, waited = backward.index("start"), backward.index("wait")
        assert backward[started + 1 : waited].count("weight") in (2, 3)
        assert backward[:started] == []
        backward = backward[waited + 1 :]


def tensors_alive(rank, world):
    """Tensors after each of some steps, when nothing looks for circles: the fewest at some moments, because a thread of gloo
    frees those of the last collective somewhat later. Runs in a worker."""
    engine = cases.engine(
        cases.build("llama", tied=False), settings(2, 2, 0, 1, 1, tensor_overlap=PIECES)
    )
    batch = cases.steps_for("llama", 1)[0][0]
    found = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            engine.train_batch(batch)
            counts = []
            for _ in range(10):
                counts.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
                time.sleep(0.01)
            found.append(min(counts))
    finally:
        gc.enable()
    return found


def test_a_step_leaves_no_activations_behind(pool):
    found = pool.run(2, tensors_alive)[0]
    assert found[1] == found[2] == found[3]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"sequence_parallel": True},
            "parallel.sequence_parallel is true, whose all-gathers and reduce-scatters are not cut into chunks",
        ),
        (
            {"pp": 2, "dp_replicate": 1, "pipeline": {"schedule": "zbv"}},
            "zbv defers the gradients of weights itself",
        ),
    ],
)
def test_what_is_not_proven_is_refused(more, message):
    config = settings(4, 2, 0, 1, 4, tensor_overlap=PIECES)
    config["parallel"] |= more
    with pytest.raises(ConfigError, match=message):
        resolve(load(config), world_size=4)
