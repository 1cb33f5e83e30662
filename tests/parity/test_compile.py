"""Compiled blocks compute what uncompiled ones do, under every ZeRO stage (the `aot_eager` backend: the whole path of torch.compile but
the code generation, which takes minutes on a CPU)."""

import pytest

import plait
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.covers import proof_after
from tests.parity import cases
from tests.parity.data_parallel import assert_same, reference, settings


def train(rank, world, config):
    """Runs in a worker."""
    model = cases.build("plain", tied=True)
    names = [name for name, _ in model.named_parameters()]
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    compiled = all(block._compiled_call_impl is not None for block in model.blocks)  # type: ignore[union-attr]
    trace = engine_trace(engine, cases.steps_for("plain", world))
    assert names == [name for name, _ in model.named_parameters()]
    return trace, compiled, names


@pytest.mark.parametrize(
    ("stage", "mode"), proof_after(1, [(3, "full"), (0, "none"), (1, "none"), (3, "none")])
)
def test_compiled_blocks(pool, stage, mode):
    """Parameter names stay, numbers stay; the checkpoint of a block that is recomputed is inside the compiled block."""
    config = settings(2, stage, 1, 1, compile={"enabled": True, "backend": "aot_eager"})
    config["parallel"]["recompute"] = {"mode": mode}
    found, compiled, _ = pool.run(2, train, config)[0]
    assert compiled
    assert_same(reference("plain", True, 2), found)


def train_in_verification(rank, world, config):
    """What a process of `plait verify` runs: a mode that skips casts, which breaks the graph. Runs in a worker."""
    with keeping_float64(cases.build("plain", tied=True)):
        return train(rank, world, config)


def test_recomputed_blocks_of_plait_verify(pool):
    """A compiled block that is recomputed resumes after a break of its graph."""
    config = settings(2, 0, 1, 1, compile={"enabled": True, "backend": "aot_eager"})
    config["parallel"]["recompute"] = {"mode": "full"}
    found, compiled, _ = pool.run(2, train_in_verification, config)[0]
    assert compiled
    assert_same(reference("plain", True, 2), found)


def test_compiled_blocks_with_shards_in_files(pool, tmp_path):
    """The hooks of a compiled block, which torch.compile traces, touch shards that are not in memory."""
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = settings(2, 3, 1, 1, compile={"enabled": True, "backend": "aot_eager"})
    config["zero_optimization"] |= {"offload_optimizer": files, "offload_param": files}
    found, compiled, _ = pool.run(2, train, config)[0]
    assert compiled
    assert_same(reference("plain", True, 2), found)
