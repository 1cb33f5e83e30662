"""What `plait.compat.deepspeed` refuses, in one process and without a group."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import plait.compat.deepspeed as deepspeed
from plait.compat.deepspeed.refused import METHODS, missing
from plait.compat.deepspeed.start import _configuration
from plait.errors import ConfigError, InputError

MODEL = nn.Linear(2, 2)
CONFIG: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {}}}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: deepspeed.initialize(model=MODEL, config=CONFIG, mpu=object()), '"parallel": {"tp": 2, "pp": 2}'),
        (lambda: deepspeed.initialize(model=MODEL, config=CONFIG, mesh_param=(1, 1)), "mesh_param"),
        (lambda: deepspeed.initialize(model=MODEL, config=CONFIG, distributed_port=29501), "MASTER_PORT"),
        (lambda: deepspeed.initialize(model=MODEL, config=CONFIG, dist_init_required=False), "there is none"),
        (lambda: deepspeed.initialize(config=CONFIG), "not NoneType"),
        (lambda: deepspeed.initialize(model=MODEL), "needs a configuration"),
        (lambda: deepspeed.initialize(model=MODEL, config={"train_batch_size": 1}), "no optimizer"),
        (lambda: deepspeed.initialize(model=deepspeed.PipelineModule([MODEL]), config=CONFIG), "loss_fn"),
        (lambda: deepspeed.PipelineModule([MODEL], partition_method="uniform"), "predicted time"),
        (lambda: deepspeed.PipelineModule([MODEL], activation_checkpoint_interval=1), "recompute"),
        (lambda: deepspeed.PipelineModule([MODEL], topology=object()), "topology"),
        (lambda: deepspeed.init_distributed(rank=3), "rank is 0 here"),
        (lambda: deepspeed.init_distributed("mpi"), "these devices use"),
        (lambda: deepspeed.init_distributed(auto_mpi_discovery=False), "launcher"),
        (lambda: deepspeed.zero.Init(remote_device="cpu"), "remote_device"),
        (lambda: deepspeed.utils.safe_get_full_fp32_param(MODEL.weight), "engine.module"),
        (lambda: deepspeed.init_inference(MODEL), "plait.generate"),
    ],
)
def test_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert words in str(error.value)


def test_no_batch_size_and_unknown_keys() -> None:
    """DeepSpeed ignores the misspelt key and clips at 1.0."""
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu"):
        deepspeed.initialize(model=MODEL, config={"optimizer": CONFIG["optimizer"]})
    with pytest.raises(ConfigError, match="did you mean gradient_clipping"):
        deepspeed.initialize(model=MODEL, config=CONFIG | {"gradient_cliping": 0.3})


def test_which_configuration() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert args.deepspeed is True and _configuration(args, None, None) == "ds.json"
    assert _configuration(parser.parse_args([]), {"a": 1}, {"b": 2}) == {"a": 1}
    assert _configuration(None, None, {"b": 2}) == {"b": 2}
    for config, params in (({}, None), (None, {})):
        with pytest.raises(InputError, match="leave one of them out"):
            _configuration(args, config, params)


def test_missing_names() -> None:
    """`hasattr` answers, and the error says what to use."""
    assert not hasattr(deepspeed, "moe") and not hasattr(deepspeed, "whatever")
    error = missing("engine", "to", METHODS)
    assert isinstance(error, AttributeError) and isinstance(error, InputError) and "engine.device" in str(error)


def test_parameters_without_an_engine_are_left_alone() -> None:
    with deepspeed.zero.GatheredParameters(MODEL.weight, modifier_rank=0) as (weight,):
        assert weight is MODEL.weight
