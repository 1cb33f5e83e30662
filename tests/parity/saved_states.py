"""Runs whose checkpoints are written beside the training, each compared with the live state of its call (`test_stale_saves.py`)."""

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
"""Name to (ranks, what is special)."""
FEW = ("zero1", "zero3", "compressed", "in-files", "no-room", "pp2")


def engine_of(kind, folder):
    """A tiny Llama, with tied weights."""
    world, special = KINDS[kind]
    special = dict(special)
    tp, stage, pp = special.pop("tp", 1), special.pop("stage", 0), special.pop("pp", 1)
    dropout, files = special.pop("dropout", False), special.pop("files", False)
    config: dict[str, Any] = {
        **settings(world // pp, tp, stage, 1, 2 if pp > 1 else 1),
        "scheduler": WARM,
    }
    config["parallel"]["pp"] = pp
    if files:
        config["zero_optimization"] |= {
            key: {**value, "nvme_path": str(folder / "files")} for key, value in IN_FILES.items()
        }
    for name, value in special.items():
        inner = config["parallel"] if name.startswith("parallel.") else config
        inner[name.removeprefix("parallel.")] = value
    engine = plait.initialize(
        build("llama", torch.float32, dropout=dropout), config, loss_fn=plait.causal_lm_loss
    )
    generators.seed(0, engine.mesh, step=0)
    return engine


def told(engine, client):
    """What a manifest says besides tensors, from the live objects."""
    scheduler, scaler = engine.lr_scheduler, engine.stepper.scaler
    return {
        "global_steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "scheduler": exact.encode(scheduler.state_dict()),
        "loss_scaler": scaler.state_dict() if scaler is not None else None,
        "rates": [float(group["lr"]) for group in engine.optimizer.param_groups],
        "client": exact.encode(client),
    }


def of_manifest(metadata):
    """The same from a checkpoint."""
    return {
        "global_steps": metadata["global_steps"],
        "skipped_steps": metadata["skipped_steps"],
        "scheduler": metadata["scheduler"]["state"],
        "loss_scaler": metadata["loss_scaler"],
        "rates": [
            float(exact.decode(group["now"]["lr"])) for group in metadata["optimizer"]["groups"]
        ],
        "client": metadata["client_state"],
    }


def saves(rank, world, kind, folder, count):
    """How many saves held the state of their call: each is begun, the next step done, and only then written. Runs in a worker."""
    at = Path(folder) / kind
    engine = engine_of(kind, at)
    micro = engine.config.batch.accumulation
    steps = cases.ragged_steps(engine.dp_size * micro, steps=4)
    may_write = threading.Semaphore(0)

    class Gated(ThreadPoolExecutor):
        """The writer's thread, which begins with nothing, not with a copy either, before the next step is done."""

        def submit(self, work, *args):  # type: ignore[override]
            def later():
                assert kind == "no-room" or may_write.acquire(
                    timeout=60
                )  # a rank without room waits for the others at once
                return work(*args)

            return super().submit(later)

    def step(number):
        pieces = steps[number % len(steps)]
        engine.train_batch(pieces[engine.dp_rank * micro : (engine.dp_rank + 1) * micro])
        torch.rand(3)  # whatever the model draws, the generators go on

    def compare(tag, wanted):
        found = open_checkpoint(at / tag)
        assert (found.manifest.content, found.manifest.own_content) == wanted[:2], (
            f"{kind}, {tag}: stale tensors"
        )
        assert wanted[2] == of_manifest(found.manifest.metadata), f"{kind}, {tag}: stale values"
        if rank == 0:
            verify(found, lambda done, of: None)  # the files are what the manifest says, too

    with ExitStack() as stack:
        stack.enter_context(patch.object(writer_module, "ThreadPoolExecutor", Gated))
        if kind == "no-room":
            stack.enter_context(
                patch.object(writer_module, "free_host_bytes", lambda: 1000 if rank else None)
            )
        step(0)
        before: tuple[str, tuple[Any, ...]] | None = None
        for number in range(count):
            tag, client = f"save-{number % 3}", {"number": number, "list": [number]}
            wanted = *live_content(engine), told(engine, client)
            if before is not None:  # which is still being written, while this one begins
                threading.Timer(0.02, may_write.release).start()
            engine.save_checkpoint(at, tag=tag, client_state=client, wait=False)
            if before is not None:
                compare(*before)
            client["list"].append("later")
            step(number + 1)
            before = None
            if number % 4 == 3 or number == count - 1:
                may_write.release()
                engine.checkpoint_written(wait=True)
                compare(tag, wanted)
            else:
                before = tag, wanted
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(at)
    return count
