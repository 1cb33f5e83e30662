"""Runs whose asynchronous checkpoints are compared with the live state at their calls."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import plait
from plait import exact
from plait.checkpoint import save as writer_module
from plait.checkpoint.inspect import open_checkpoint, verify
from plait.engine import generators
from tests.parity import cases
from tests.parity.digests import build
from tests.parity.live_content import live_content
from tests.parity.tensor_parallel import settings

WARM = {"type": "WarmupLR", "params": {"warmup_num_steps": 40, "warmup_max_lr": 1e-3}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}
IN_FILES = {
    "offload_optimizer": {"device": "nvme", "buffer_size": 5000},
    "offload_param": {"device": "nvme", "buffer_size": 20_000},
}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0": (2, {"stage": 0}),
    "zero1": (2, {"stage": 1, **FP16}),
    "zero2": (2, {"stage": 2}),
    "zero3": (2, {"stage": 3, "dropout": True}),
    "fused": (
        2,
        {"stage": 3, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fused": True}}},
    ),
    "in-backward": (
        2,
        {
            "stage": 2,
            "parallel.optimizer_in_backward": True,
            "parallel.unused_parameters": False,
            "gradient_clipping": 0,
        },
    ),
    "compressed": (
        2,
        {"stage": 0, "parallel.compress_gradients": "int8", "parallel.error_feedback": True},
    ),
    "shared-memory": (2, {"stage": 3, "parallel.transport": "shared-memory"}),
    "in-files": (2, {"stage": 3, "files": True}),
    "no-room": (2, {"stage": 1}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
}
"""(ranks, overrides) by name.

`tp`, `pp` and `stage` are sizes and the ZeRO stage, `dropout` and `files` switches of `engine_of`.
A name that starts with "parallel." is a setting of that section, and any other a whole section.
"""
FEW = ("zero1", "zero3", "compressed", "in-files", "no-room", "pp2")


def engine_of(kind, folder):
    """Return an engine of a tiny Llama with tied weights."""
    world, overrides = KINDS[kind]
    overrides = dict(overrides)
    pp = overrides.pop("pp", 1)
    config: dict[str, Any] = {
        **settings(
            world // pp,
            overrides.pop("tp", 1),
            overrides.pop("stage", 0),
            replicas=1,
            accumulation=2 if pp > 1 else 1,
        ),
        "scheduler": WARM,
    }
    config["parallel"]["pp"] = pp
    dropout = overrides.pop("dropout", False)
    if overrides.pop("files", False):
        for key, value in IN_FILES.items():
            config["zero_optimization"][key] = {**value, "nvme_path": str(folder / "files")}
    for name, value in overrides.items():
        section = config["parallel"] if name.startswith("parallel.") else config
        section[name.removeprefix("parallel.")] = value

    model = build("llama", torch.float32, dropout=dropout)
    engine = plait.initialize(model, config, loss_fn=plait.causal_lm_loss)
    generators.seed(0, engine.mesh, step=0)
    return engine


def live_metadata(engine, client):
    """Return what a manifest records besides tensors, from the live objects."""
    scaler = engine.stepper.scaler
    return {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "scheduler": exact.encode(engine.lr_scheduler.state_dict()),
        "loss_scaler": scaler.state_dict() if scaler is not None else None,
        "rates": [float(group["lr"]) for group in engine.optimizer.param_groups],
        "client": exact.encode(client),
    }


def saved_metadata(metadata):
    """Return the entries of `live_metadata` from a manifest."""
    groups = metadata["optimizer"]["groups"]
    return {
        "global_steps": metadata["global_steps"],
        "skipped_steps": metadata["skipped_steps"],
        "scheduler": metadata["scheduler"]["state"],
        "loss_scaler": metadata["loss_scaler"],
        "rates": [float(exact.decode(group["now"]["lr"])) for group in groups],
        "client": metadata["client_state"],
    }


def saves(rank, world, kind, folder, count):
    """Save, train a step, and only then write, `count` times. Runs on every rank.

    Every checkpoint must have the state of its call. Returns the number of saves.
    """
    path = Path(folder) / kind
    engine = engine_of(kind, path)
    accumulation = engine.config.batch.accumulation
    steps = cases.ragged_steps(engine.dp_size * accumulation, steps=4)
    may_write = threading.Semaphore(0)

    class GatedExecutor(ThreadPoolExecutor):
        """The writer's thread, which begins with nothing before the next step is done."""

        def submit(self, work, *args):  # type: ignore[override]
            def later():
                # A rank without room would wait here for the others, which train.
                assert kind == "no-room" or may_write.acquire(timeout=60)
                return work(*args)

            return super().submit(later)

    def step(number):
        batches = steps[number % len(steps)]
        start = engine.dp_rank * accumulation
        engine.train_batch(batches[start : start + accumulation])
        # The generators must go on even if the model draws nothing.
        torch.rand(3)

    def compare(tag, contents, metadata):
        checkpoint = open_checkpoint(path / tag)
        manifest = checkpoint.manifest
        assert (manifest.content, manifest.own_content) == contents, f"{kind}, {tag}: stale tensors"
        assert metadata == saved_metadata(manifest.metadata), f"{kind}, {tag}: stale values"
        if rank == 0:
            # The files have the content that the manifest records.
            verify(checkpoint, lambda done, of: None)

    # The order of writing and training is a race, which only replaced internals can decide.
    with ExitStack() as stack:
        stack.enter_context(patch.object(writer_module, "ThreadPoolExecutor", GatedExecutor))
        if kind == "no-room":
            stack.enter_context(
                patch.object(writer_module, "free_host_bytes", lambda: 1000 if rank else None)
            )

        step(0)
        pending: tuple[Any, ...] | None = None
        for number in range(count):
            tag = f"save-{number % 3}"
            client = {"number": number, "list": [number]}
            expected = (tag, live_content(engine), live_metadata(engine, client))
            if pending is not None:
                # The previous checkpoint is still being written when this save begins.
                threading.Timer(0.02, may_write.release).start()
            engine.save_checkpoint(path, tag=tag, client_state=client, wait=False)
            if pending is not None:
                compare(*pending)

            client["list"].append("later")
            step(number + 1)
            pending = expected
            if number % 4 == 3 or number == count - 1:
                may_write.release()
                engine.checkpoint_written(wait=True)
                compare(*expected)
                pending = None

    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(path)
    return count
