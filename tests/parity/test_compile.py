"""Compiled blocks compute what uncompiled ones do, under every ZeRO stage.

The backend `aot_eager` is torch.compile without the code generation, which takes minutes on CPUs.
"""

from typing import Any

import pytest
import torch

import plait
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.covers import proof_after
from tests.parity import cases, tensor_parallel
from tests.parity.data_parallel import assert_same, reference, settings
from tests.parity.full_tensors import full_weights
from tests.parity.mean_losses import close, mean_loss


def config_of(stage, recompute="none"):
    config = settings(2, stage, 1, 1, compile={"enabled": True, "backend": "aot_eager"})
    config["parallel"]["recompute"] = {"mode": recompute}
    return config


def train(rank, world, config):
    """Return the trace of a run with compiled blocks. Runs on every rank."""
    model = cases.build("plain", tied=True)
    names = [name for name, _ in model.named_parameters()]
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    blocks: Any = model.blocks
    assert all(block._compiled_call_impl is not None for block in blocks)
    trace = engine_trace(engine, cases.steps_for("plain", world))
    assert names == [name for name, _ in model.named_parameters()]
    return trace


def train_in_verification(rank, world, config):
    """Train in the mode of `plait verify`, which breaks the graph. Runs on every rank."""
    with keeping_float64(cases.build("plain", tied=True)):
        return train(rank, world, config)


def check(pool, config, train=train):
    assert_same(reference("plain", True, 2), pool.run(2, train, config)[0])


@pytest.mark.parametrize(
    ("stage", "mode"), proof_after(1, [(3, "full"), (0, "none"), (1, "none"), (3, "none")])
)
def test_compiled_blocks_equal_one_process(pool, stage, mode):
    """The checkpoint of a recomputed block is inside of the compiled block."""
    check(pool, config_of(stage, mode))


def test_recomputed_blocks_of_plait_verify(pool):
    """A compiled block that is recomputed resumes after a break of its graph."""
    check(pool, config_of(0, "full"), train_in_verification)


def test_compiled_blocks_with_shards_in_files(pool, tmp_path):
    """torch.compile traces the hooks of a block, which read shards that are not in memory."""
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = config_of(3)
    config["zero_optimization"] |= {"offload_optimizer": files, "offload_param": files}
    check(pool, config)


def train_a_compiled_model(rank, world):
    """Return the weights of a loop that compiles the model, and of one that does not.

    Runs on every rank.
    """
    weights = []
    for compiles in (False, True):
        model = cases.build("plain", tied=True)
        config = tensor_parallel.settings(2, 2, 0, 1, 1, **tensor_parallel.plan("plain"))
        plait.parallelize(model, config)
        called = torch.compile(model, backend="eager") if compiles else model
        optimizer = cases.adamw(list(model.parameters()))
        for (micro_batch,) in cases.ragged_steps(1, steps=3, keys=()):
            mean_loss(called, micro_batch)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(full_weights(model))
    return weights


def test_a_model_that_its_loop_compiles(pool):
    """torch.compile traces the hooks of a model that it compiles as a whole."""
    for expected, weights in pool.run(2, train_a_compiled_model):
        close(weights, expected)
