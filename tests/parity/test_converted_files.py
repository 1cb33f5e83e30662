"""Training with files of other programs has their layout, and the weights of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import plait
from plait.config.convert.conversion import convert
from tests.parity import cases, tensor_parallel
from tests.parity.data_parallel import materialised
from tests.parity.full_tensors import full_weights
from tests.parity.mean_losses import close, mean_loss

STEPS = 3
FSDP: dict[str, Any] = {
    "distributed_type": "FSDP",
    "num_processes": 2,
    "main_training_function": "main",
}
MEGATRON = (
    "--micro-batch-size 2 --train-iters 3 --optimizer adam --lr 1e-3 --weight-decay 0.1"
    " --adam-beta2 0.999 --lr-decay-style constant"
)
FILES: dict[str, tuple[dict[str, Any] | list[str], dict[str, int]]] = {
    "accelerate fsdp 2": (
        {
            **FSDP,
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": True,
                "fsdp_activation_checkpointing": True,
            },
        },
        {"stage": 3, "dp_shard": 2},
    ),
    "accelerate hybrid": (
        {
            **FSDP,
            "num_processes": 4,
            "num_machines": 2,
            "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"},
        },
        {"stage": 3, "dp_replicate": 2, "dp_shard": 2},
    ),
    "accelerate tensor parallel": (
        {
            **FSDP,
            "distributed_type": "MULTI_CPU",
            "parallelism_config": {"parallelism_config_tp_size": 2},
        },
        {"stage": 0, "tp": 2},
    ),
    "trainer": (
        {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"cpu_ram_efficient_loading": True}},
        {"stage": 2, "dp_shard": 2},
    ),
    "megatron": (
        f"--tensor-model-parallel-size 2 --clip-grad 0.5 {MEGATRON}".split(),
        {"stage": 0, "tp": 2},
    ),
    "megatron distributed optimizer": (
        f"--use-distributed-optimizer {MEGATRON}".split(),
        {"stage": 1, "dp_shard": 2},
    ),
}
"""File or arguments of the other program, and the layout and ZeRO stage that follow.

Files with other keys are in tests/unit/config/convert.
"""


def trained(rank, world, config):
    """Return the layout, the weights and the norm of clipping. Runs on every rank."""
    optimizer = None if "optimizer" in config else cases.adamw
    engine = plait.initialize(materialised("plain", tied=True), config, optimizer=optimizer)
    for step in cases.ragged_steps(engine.dp_size, steps=STEPS, keys=()):
        loss, _ = mean_loss(engine, step[engine.dp_rank])
        engine.backward(loss)
        engine.step()
    axes = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    layout = {axis: getattr(engine.mesh.layout, axis) for axis in axes}
    layout["stage"] = engine.config.data_parallel.stage
    weights = full_weights(engine.model)
    clipping = engine.config.gradient_clipping
    engine.close()
    return layout, weights, clipping


def one_process(dp, clipping):
    """Return the weights of one process, whose loss is the mean of the ranks' means."""
    model = materialised("plain", tied=True)
    optimizer = cases.adamw(list(model.parameters()))
    for step in cases.ragged_steps(dp, steps=STEPS, keys=()):
        for batch in step:
            (mean_loss(model, batch)[0] / dp).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@pytest.mark.parametrize("name", FILES)
def test_a_converted_file_trains_like_one_process(pool, tmp_path, name):
    content, layout = FILES[name]
    source: Any = content
    if isinstance(content, dict):
        source = tmp_path / "file.json"
        source.write_text(json.dumps(content))
    config = {"train_micro_batch_size_per_gpu": 2, **convert(source).tree}

    expected = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1, "cp": 1, **layout}
    if expected["tp"] > 1:
        config["parallel"] = {**config["parallel"], **tensor_parallel.plan("plain")}
    dp = expected["dp_replicate"] * expected["dp_shard"]
    for actual, weights, clipping in pool.run(dp * expected["tp"], trained, config):
        assert actual == expected
        close(weights, one_process(dp, clipping))
