"""Training under files of other programs: the layout that the file describes, and the weights of one process in float64."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import plait
from plait.config.convert.conversion import convert
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases, tensor_parallel
from tests.parity.data_parallel import CLIPPING, materialised
from tests.parity.mean_losses import close, mean_loss

MICRO, STEPS = 2, 3
FSDP = {"distributed_type": "FSDP", "num_processes": 2, "main_training_function": "main"}
MEGATRON = "--micro-batch-size 2 --train-iters 3 --optimizer adam --lr 1e-3 --weight-decay 0.1 --adam-beta2 0.999 --lr-decay-style constant"
FILES: dict[str, tuple[dict[str, Any] | list[str], dict[str, int]]] = {
    # name: (what the other program is given, the layout and stage that follow)
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
    "accelerate fsdp 1": (
        {**FSDP, "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
        {"stage": 2, "dp_shard": 2},
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
    "accelerate deepspeed": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True},
        },
        {"stage": 1, "dp_shard": 2},
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


def trained(rank, world, source):
    """Runs in a worker: (layout, weights, the norm of clipping)."""
    optimizer = None if "optimizer" in source else cases.adamw
    engine = plait.initialize(materialised("plain", tied=True), source, optimizer=optimizer)
    layout = engine.mesh.layout
    for step in cases.ragged_steps(engine.dp_size, steps=STEPS, keys=()):
        loss, _ = mean_loss(engine, step[engine.dp_rank])
        engine.backward(loss)
        engine.step()
    found = {name: getattr(layout, name) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp")}
    weights = {name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}
    stage, clipping = engine.config.data_parallel.stage, engine.config.gradient_clipping
    engine.close()
    return {**found, "stage": stage}, weights, clipping


def one_process(dp, clipping):
    """The same steps: the mean of the ranks' means."""
    model = materialised("plain", tied=True)
    optimizer = cases.adamw(list(model.parameters()))
    for step in cases.ragged_steps(dp, steps=STEPS, keys=()):
        for piece in step:
            (mean_loss(model, piece)[0] / dp).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", FILES)
def test_a_file(pool, tmp_path, name):
    given, expected = FILES[name]
    source: Any = given
    if isinstance(given, dict):
        (tmp_path / "ds.json").write_text(
            json.dumps({"zero_optimization": {"stage": 1}, "gradient_clipping": CLIPPING})
        )
        source = tmp_path / "file.json"
        source.write_text(json.dumps(given))
    tree = {"train_micro_batch_size_per_gpu": MICRO, **convert(source).tree}
    wanted = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1, "cp": 1, **expected}
    if wanted["tp"] > 1:
        tree["parallel"] = {**tree["parallel"], **tensor_parallel.plan("plain")}
    dp = wanted["dp_replicate"] * wanted["dp_shard"]
    for layout, weights, clipping in pool.run(dp * wanted["tp"], trained, tree):
        assert layout == wanted
        close(weights, one_process(dp, clipping))
