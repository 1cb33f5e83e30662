"""What an engine leaves behind when it is closed in a process group that it did not make (defect B12)."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import plait
from plait.cluster import mesh, process_groups
from tests.parity import cases
from tests.parity.data_parallel import settings


def held():
    """Descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def built(folder):
    """An engine that has taken one step. With `folder`, shards, gradients and states are in files there."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": cases.OPTIMIZER}
    if folder is not None:
        files = {"device": "nvme", "nvme_path": str(folder)}
        config["zero_optimization"] = {
            "stage": 3,
            "offload_param": files,
            "offload_optimizer": files,
        }
    model = cases.build("plain", tied=True)
    engine = cases.engine(model, {**config, "parallel": {"measure_seconds": 0}})
    engine.train_batch(cases.ragged_steps(1, steps=1, keys=())[0])
    return engine


def engines(rank, world, folder):
    """Runs in a worker. The pool keeps one mesh a layout for all of its tasks; here each engine has its own."""
    with (
        mock.patch.object(mesh, "init_device_mesh", init_device_mesh),
        mock.patch.object(mesh, "end_groups", process_groups.end_groups),
    ):
        built(None).close()
        before = held()
        for _ in range(5):
            built(None).close()
            assert held() == before
        first, second = built(None), built(None)
        first.close()
        second.train_batch(cases.ragged_steps(1, steps=1, keys=())[0])
        first.close()  # again, for nothing
        second.close()
        del first, second
        assert held() == before

        others = set(threading.enumerate())  # of other tests' engines, which nobody closed
        engine = built(folder)
        assert any(str(folder) in _target(name) for name in os.listdir("/proc/self/fd"))
        assert any(
            thread.name.startswith("plait-disk") for thread in set(threading.enumerate()) - others
        )
        engine.close()  # and kept
        assert not [name for name in os.listdir("/proc/self/fd") if str(folder) in _target(name)]
        assert not [
            thread.name
            for thread in set(threading.enumerate()) - others
            if thread.name.startswith("plait-")
        ]
        assert all(
            torch.isfinite(p.to_local() if hasattr(p, "to_local") else p).all()
            for p in engine.model.parameters()
        )
    dist.barrier()


def _target(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # the descriptor of the listing itself
        return ""


def test_engines_in_one_process_group_leave_nothing_behind(pool, tmp_path):
    """B12: groups, descriptors and threads end with the engine that made them, and with no other; files of the disk tier too."""
    pool.run(2, engines, tmp_path)


def one_after_the_other(rank, world):
    """Runs in a worker. Two engines of one layout, whose mesh has a group for each of two axes."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "parallel": {"tp": 2, "measure_seconds": 0},
    }
    with (
        mock.patch.object(mesh, "init_device_mesh", init_device_mesh),
        mock.patch.object(mesh, "end_groups", process_groups.end_groups),
    ):
        for _ in range(2):
            engine = cases.engine(cases.build("llama", tied=True), config)
            for parameter in engine.model.parameters():
                full = (
                    parameter.detach().full_tensor()
                    if isinstance(parameter, DTensor)
                    else parameter
                )
                assert full.shape == parameter.shape
            engine.close()
    dist.barrier()


def test_a_second_engine_gathers_over_its_own_groups(pool):
    """torch remembers operators' results by the shape of a mesh: after `close()`, `full_tensor()` of what an operator made of the next
    engine's parameters asked for a group that had ended."""
    pool.run(4, one_after_the_other)


def models_that_stay(rank, world):
    """Cases whose model outlives its owner. Runs in a worker."""
    alive = []
    for begin in (plait.initialize, plait.parallelize):
        for stage in (0, 2, 3):
            model = cases.build("plain", tied=True)
            owner = begin(model, settings(2, stage, 1, 1))
            loss = model(cases.ragged_steps(1, steps=1, keys=())[0][0]["input_ids"]).logits.sum()
            if begin is plait.initialize:
                owner.backward(loss)
                owner.step()
            else:
                loss.backward()
                owner.step(torch.optim.SGD(model.parameters(), lr=0.1))
            owner.close()
            reference = weakref.ref(model)
            del model, owner, loss
            gc.collect()
            if reference() is not None:
                alive.append((begin.__name__, stage))
    return alive


def test_a_trained_model_is_freed(pool):
    """Hooks on gradients kept the model and its optimizer's states for ever: a process that trains several models ran out of memory."""
    assert pool.run(2, models_that_stay) == [[], []]
