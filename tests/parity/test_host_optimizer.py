"""Masters, gradients and states on the host (`offload_optimizer.device = "cpu"`), on CPU processes: the device is refused there, because
nothing moves, but everything else that offload changes is done, so its numbers are shown here; copies and streams need a GPU."""

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


def is_offloaded(module):
    """Whether torch moves the unit's shards to and from the host."""
    return all(
        isinstance(group.offload_policy, CPUOffloadPolicy) for group in parameter_groups(module)
    )


@pytest.fixture(scope="module")
def unchecked():
    """Workers of their own, in which the check is put out."""
    made = Pool()
    yield made
    made.close()


def digests(rank, world, kind, config, ratios, dtype):
    """Runs in a worker. Ratio 0 does not offload."""
    found = []
    for ratio in ratios:
        offload = ratio > 0
        zero = {
            **config["zero_optimization"],
            **({"offload_optimizer": {"device": "cpu", "ratio": ratio}} if offload else {}),
        }
        resolved = resolve(load({**config, "zero_optimization": zero}), world_size=world)
        if offload and OptimizerOffload.check is CHECK:  # later it is out
            with pytest.raises(ConfigError, match="nothing would move"):
                cases.engine(build(kind, dtype, dropout=False), resolved)
            OptimizerOffload.check = lambda *_, **__: None  # type: ignore[method-assign]
        engine = cases.engine(build(kind, dtype, dropout=False), resolved)
        assert engine.parts.shard.master_weights_on_host == offload
        on_host = [
            name
            for name, module in engine.model.named_modules()
            if isinstance(module, FSDPModule) and is_offloaded(module)
        ]
        layers = [f"model.layers.{index}" for index in range(2)]
        assert on_host == ([] if not offload else ["", *layers] if ratio == 1 else layers[:1])
        dp = world // config["parallel"]["tp"]
        found.append(
            digest(
                engine_trace(engine, cases.ragged_steps(dp * config["gradient_accumulation_steps"]))
            )
        )
    return found


@pytest.mark.parametrize(
    ("world", "tp", "stage", "more"),
    [
        (1, 1, 3, {"bf16": {"enabled": True}}),
        (2, 1, 2, {}),
        (2, 1, 3, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
        (4, 2, 1, {}),
    ],
)
def test_same_bits(unchecked, world, tp, stage, more):
    """Also of a share of the blocks."""
    config = {**settings(world, tp, stage, 1, 2), **more}
    for found in unchecked.run(world, digests, "llama", config, [0, 1, 0.2], torch.float32):
        assert found == [found[0]] * 3


def in_a_pipeline(rank, world, config):
    """Runs in a worker."""
    OptimizerOffload.check = lambda *_, **__: None  # type: ignore[method-assign]
    zero = {**config["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    return pipeline.train(rank, world, "qwen3", True, {**config, "zero_optimization": zero})


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [pytest.param(1, "interleaved-1f1b", marks=pytest.mark.proof), (2, "zbv"), (3, "1f1b")],
)
def test_in_a_pipeline(unchecked, stage, schedule):
    """One process in float64: a schedule that reduces outside of autograd, stages of a rank that end at different times, freed parameters;
    embeddings tied between the first and the last stage."""
    found = unchecked.run(
        4, in_a_pipeline, pipeline.settings(stage, 4, schedule, pp=2, dp_shard=2)
    )[0]
    assert_same(pipeline.reference("qwen3", True, 8), found)
