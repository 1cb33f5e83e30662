"""What the tests train on simulated GPUs. Imported by workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import plait
from plait.parallel.data.compression import Residuals
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.parity import cases, pipelines, tensor_parallel
from tests.parity.data_parallel import CLIPPING, SEED

TECHNIQUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": {"mode": "full"}},
    "recompute matrices": {"recompute": {"mode": "selective"}},
    "activations on the host": {"activation_offload": {"fraction": 1.0}},
    "half of them": {"activation_offload": {"fraction": 0.5}, "recompute": {"mode": "full"}},
    "chunks of the loss": {"loss_chunk_tokens": 4},
    "all-reduce in a ring": {"all_reduce": "ring"},
    "all-reduce by doubling": {"all_reduce": "recursive-doubling"},
}
"""Settings of `parallel`."""

STATES: dict[str, dict[str, Any]] = {
    "on the device": {},
    "on the host": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "half on the host": {"offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5}},
    "parameters on the host too": {
        key: {"device": "cpu", "pin_memory": True} for key in ("offload_optimizer", "offload_param")
    },
}
"""Settings of `zero_optimization`."""


def on_axes(tp, dp, stage, technique, states):
    """A configuration file without a pipeline; two micro-batches. With tp also along the sequence, by turns, and in chunks."""
    sequence = tp > 1 and stage >= 2 and technique != "chunks of the loss"
    more = TECHNIQUES[technique] | (
        {"tensor_overlap": 2} if tp > 1 and not sequence and stage else {}
    )
    config = tensor_parallel.settings(tp * dp, tp, stage, 2 if dp == 4 else 1, 2, sequence, **more)
    config["zero_optimization"] |= STATES[states]
    return config


def fits(tp, dp, stage, technique, states):
    """Whether Plait takes it, and it is not another row."""
    if "parameters" in states and stage < 3:
        return False
    return (
        (stage > 0 or states == "on the device")
        and (stage == 0 or not technique.startswith("all-reduce"))
        and (dp > 1 or stage == 0)
    )


def in_stages(schedule, pp, tp, dp, stage, technique):
    """A configuration file with a pipeline."""
    shard = {"dp_replicate": dp} if stage == 0 else {"dp_shard": dp}
    return pipelines.settings(stage, 8, schedule, pp=pp, tp=tp, **shard, **TECHNIQUES[technique])


def config_of(world, stage, *, parallel, zero=None, **more):
    """A configuration file with data parallelism."""
    degrees = {"dp_shard": world} if stage else {"dp_replicate": world}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "optimizer": cases.OPTIMIZER,
        "parallel": {
            **degrees,
            "measure_seconds": 0,
            **parallel,
        },  # which algorithm runs does not depend on the machine's load
        "run": {"seed": SEED},
        **more,
    }


def resumed(rank, world, config, folder, dtype, beside=False):
    """Four steps; the last two from a checkpoint of the first two; the devices of both engines' residuals by name. `beside`: it is written
    while the training goes on. Runs in a worker."""
    device: Any = sys.modules.get("simulated_device.on_torch")
    model = cases.build("llama", tied=True, dtype=dtype)
    with keeping_float64(model):
        straight = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    steps = cases.ragged_steps(straight.dp_size * config["gradient_accumulation_steps"], steps=4)
    engine_trace(straight, steps[:2])
    before = device.copies() if beside else {}
    straight.save_checkpoint(folder, wait=not beside)
    if beside:
        staged = device.copies()["deferred"] - before["deferred"]
        there = sum(
            parameter.device.type != "cpu" for parameter in straight.model.parameters()
        )  # others are offloaded with their states
        assert staged >= there, f"{staged} copies did not wait"
    on = engine_trace(straight, steps[2:])
    straight.checkpoint_written(wait=True)
    again = plait.initialize(
        cases.build("llama", tied=True, dtype=dtype), config, loss_fn=plait.causal_lm_loss
    )
    again.load_checkpoint(folder)
    residuals = [engine.hooks.find(Residuals) for engine in (straight, again)]
    kinds = [
        {name: tensor.device.type for name, tensor in found.state().items()}
        for found in residuals
        if found is not None
    ]
    return on, engine_trace(again, steps[2:]), kinds


def steps_taken(rank, world, config, count, dtype=torch.float32):
    """`train_batch` alone, as a program calls it: how the last step copied, and pinned memory before, with and after the engine. Runs in a
    worker."""
    device: Any = sys.modules["simulated_device.on_torch"]
    pinned = [device.pinned_bytes()]
    engine = plait.initialize(
        cases.build("llama", tied=True, dtype=dtype), config, loss_fn=plait.causal_lm_loss
    )
    micro = config["gradient_accumulation_steps"]
    losses = []
    for step in cases.ragged_steps(engine.dp_size * micro, steps=count):
        before = device.copies()
        losses.append(
            engine.train_batch(list(step[engine.dp_rank * micro : (engine.dp_rank + 1) * micro]))
        )
        after = device.copies()
    pinned.append(device.pinned_bytes())
    found = [float(result.loss) for result in losses]
    engine.close()
    del engine, losses
    torch.cuda.synchronize()
    pinned.append(device.pinned_bytes())
    return {
        "copies": {way: after[way] - before[way] for way in after},
        "pinned": pinned,
        "losses": found,
    }


def moved(rank, world, saving, loading, folder):
    """Losses of two steps, and of the same steps from a checkpoint on another layout. Runs in a worker."""
    losses = []
    for config in (saving, loading):
        engine = plait.initialize(
            cases.build("llama", tied=True), config, loss_fn=plait.causal_lm_loss
        )
        micro = config["gradient_accumulation_steps"]
        steps = cases.ragged_steps(engine.dp_size * micro, steps=3)
        if config is saving:
            engine.train_batch(
                list(steps[0][engine.dp_rank * micro : (engine.dp_rank + 1) * micro])
            )
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        mine = slice(engine.dp_rank * micro, (engine.dp_rank + 1) * micro)
        losses += [float(engine.train_batch(list(step[mine])).loss) for step in steps[1:]]
        dist.barrier()
        assert Path(folder).exists()
    return losses[:2], losses[2:]
