"""Configurations and training runs on simulated GPUs. Ranks import it."""

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
    """Return a configuration without a pipeline and with two micro-batches.

    With tp, some stages have sequence parallelism and others overlapped sums.
    """
    sequence = tp > 1 and stage >= 2 and technique != "chunks of the loss"
    parallel = dict(TECHNIQUES[technique])
    if tp > 1 and not sequence and stage:
        parallel["tensor_overlap"] = 2
    replicas = 2 if dp == 4 else 1
    config = tensor_parallel.settings(tp * dp, tp, stage, replicas, 2, sequence, **parallel)
    config["zero_optimization"] |= STATES[states]
    return config


def fits(tp, dp, stage, technique, states):
    """Return whether Plait supports a combination, and it does not repeat another."""
    if "parameters" in states and stage < 3:
        return False
    if stage == 0:
        return states == "on the device"
    return dp > 1 and not technique.startswith("all-reduce")


def in_stages(schedule, pp, tp, dp, stage, technique):
    """Return a configuration with a pipeline."""
    shard = {"dp_replicate": dp} if stage == 0 else {"dp_shard": dp}
    return pipelines.settings(stage, 8, schedule, pp=pp, tp=tp, **shard, **TECHNIQUES[technique])


def config_of(world, stage, *, parallel, zero=None, **more):
    """Return a configuration with data parallelism."""
    degrees = {"dp_shard": world} if stage else {"dp_replicate": world}
    # Without a measurement the choice of the algorithm does not depend on the load of the machine.
    degrees["measure_seconds"] = 0
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "optimizer": cases.OPTIMIZER,
        "parallel": {**degrees, **parallel},
        "run": {"seed": SEED},
        **more,
    }


def micro_batches_of(engine, step):
    """Return the micro-batches of a step that belong to the engine's data-parallel rank."""
    count = engine.config.batch.accumulation
    return list(step[engine.dp_rank * count : (engine.dp_rank + 1) * count])


def resumed(rank, world, config, folder, dtype, asynchronous=False):
    """Train two steps, save, train two more, and repeat the last two from the checkpoint.

    Runs on every rank. With `asynchronous`, the checkpoint is written during the next step.

    Returns:
        The traces of the last two steps and of their repetition, and the devices of the residuals
        of both engines by name.
    """
    device: Any = sys.modules.get("simulated_device.on_torch")
    model = cases.build("llama", tied=True, dtype=dtype)
    with keeping_float64(model):
        straight = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    steps = cases.ragged_steps(straight.dp_size * config["gradient_accumulation_steps"], steps=4)
    engine_trace(straight, steps[:2])
    before = device.copies() if asynchronous else {}
    straight.save_checkpoint(folder, wait=not asynchronous)
    if asynchronous:
        staged = device.copies()["deferred"] - before["deferred"]
        # Offloaded parameters are on the host already.
        on_device = sum(p.device.type != "cpu" for p in straight.model.parameters())
        assert staged >= on_device, f"{staged} copies did not wait"
    on = engine_trace(straight, steps[2:])
    straight.checkpoint_written(wait=True)
    again = plait.initialize(
        cases.build("llama", tied=True, dtype=dtype), config, loss_fn=plait.causal_lm_loss
    )
    again.load_checkpoint(folder)
    residuals = [engine.hooks.find(Residuals) for engine in (straight, again)]
    kinds = [
        {name: tensor.device.type for name, tensor in residual.state().items()}
        for residual in residuals
        if residual is not None
    ]
    return on, engine_trace(again, steps[2:]), kinds


def steps_taken(rank, world, config, count, dtype=torch.float32):
    """Train and observe copies. Runs on every rank.

    Returns:
        The copies of the last step by kind, the losses, and the bytes of pinned memory before, with
        and after the engine.
    """
    device: Any = sys.modules["simulated_device.on_torch"]
    pinned = [device.pinned_bytes()]
    engine = plait.initialize(
        cases.build("llama", tied=True, dtype=dtype), config, loss_fn=plait.causal_lm_loss
    )
    accumulation = config["gradient_accumulation_steps"]
    losses = []
    for step in cases.ragged_steps(engine.dp_size * accumulation, steps=count):
        before = device.copies()
        losses.append(engine.train_batch(micro_batches_of(engine, step)))
        after = device.copies()
    pinned.append(device.pinned_bytes())
    values = [float(result.loss) for result in losses]
    engine.close()
    del engine, losses
    torch.cuda.synchronize()
    pinned.append(device.pinned_bytes())
    return {
        "copies": {kind: after[kind] - before[kind] for kind in after},
        "pinned": pinned,
        "losses": values,
    }


def moved(rank, world, saving, loading, folder):
    """Return the losses of two steps, and of the same steps from a checkpoint on another layout.

    Runs on every rank.
    """
    losses = []
    for config in (saving, loading):
        engine = plait.initialize(
            cases.build("llama", tied=True), config, loss_fn=plait.causal_lm_loss
        )
        steps = cases.ragged_steps(engine.dp_size * config["gradient_accumulation_steps"], steps=3)
        if config is saving:
            engine.train_batch(micro_batches_of(engine, steps[0]))
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        for step in steps[1:]:
            losses.append(float(engine.train_batch(micro_batches_of(engine, step)).loss))
        dist.barrier()
        assert Path(folder).exists()
    return losses[:2], losses[2:]
