"""Masters, gradients and states on the host (`offload_optimizer.device = "cpu"`), on CPU processes.

A CPU run refuses this, because nothing would move. The tests remove the check: all other changes
of offloading are then made, and the numbers compared. Copies and streams need a GPU.
"""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from plait._torch.units import parameter_groups
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from plait.parallel.techniques.offload import OptimizerOffload
from plait.verify.parity import engine_trace
from tests.parity import cases
from tests.parity import pipelines as pipeline
from tests.parity.data_parallel import assert_same
from tests.parity.digests import build, digest
from tests.parity.tensor_parallel import settings
from tests.pool import Pool

CHECK = OptimizerOffload.check
ON_HOST = {1: ["", "model.layers.0", "model.layers.1"], 0.2: ["model.layers.0"], 0: []}
"""Units whose optimizer states are on the host, by the offloaded ratio."""


@pytest.fixture(scope="module")
def unchecked():
    """Workers of these tests only, in which the check is removed."""
    workers = Pool()
    yield workers
    workers.close()


def remove_check():
    OptimizerOffload.check = lambda *_, **__: None  # type: ignore[method-assign]


def units_on_host(model):
    """Return names of the units whose shards torch moves to and from the host."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            policies = [group.offload_policy for group in parameter_groups(module)]
            if all(isinstance(policy, CPUOffloadPolicy) for policy in policies):
                names.append(name)
    return names


def digests(rank, world, config, ratios):
    """Return the bits of a run for each ratio, of which 0 does not offload. Runs on every rank."""
    bits = []
    for ratio in ratios:
        zero = dict(config["zero_optimization"])
        if ratio:
            zero["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
        resolved = resolve(load({**config, "zero_optimization": zero}), world_size=world)
        model = build("llama", torch.float32, dropout=False)
        # An earlier test may have removed the check in this worker.
        if ratio and OptimizerOffload.check is CHECK:
            with pytest.raises(ConfigError, match="nothing would move"):
                cases.engine(model, resolved)
            remove_check()
            model = build("llama", torch.float32, dropout=False)
        engine = cases.engine(model, resolved)
        assert engine.parts.shard.master_weights_on_host == (ratio > 0)
        assert units_on_host(engine.model) == ON_HOST[ratio]
        dp = world // config["parallel"]["tp"]
        steps = cases.ragged_steps(dp * config["gradient_accumulation_steps"])
        bits.append(digest(engine_trace(engine, steps)))
    return bits


@pytest.mark.parametrize(
    ("world", "tp", "stage", "sections"),
    [
        (1, 1, 3, {"bf16": {"enabled": True}}),
        (2, 1, 2, {}),
        (2, 1, 3, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
        (4, 2, 1, {}),
    ],
)
def test_same_bits_with_and_without_offload(unchecked, world, tp, stage, sections):
    config = {**settings(world, tp, stage, 1, 2), **sections}
    for bits in unchecked.run(world, digests, config, list(ON_HOST)):
        assert len(set(bits)) == 1


def train_pipeline(rank, world, config):
    """Runs on every rank."""
    remove_check()
    zero = {**config["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    return pipeline.train(rank, world, "qwen3", True, {**config, "zero_optimization": zero})


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [
        # Two stages of a rank end at different times.
        pytest.param(1, "interleaved-1f1b", marks=pytest.mark.proof),
        # Gradients are reduced outside of autograd.
        (2, "zbv"),
        # Parameters are freed between micro-batches.
        (3, "1f1b"),
    ],
)
def test_a_pipeline_equals_one_process(unchecked, stage, schedule):
    """The embedding is tied between the first and the last stage."""
    config = pipeline.settings(stage, 4, schedule, pp=2, dp_shard=2)
    trace = unchecked.run(4, train_pipeline, config)[0]
    assert_same(pipeline.reference("qwen3", True, 8), trace)
