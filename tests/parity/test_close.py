"""A closed engine leaves nothing behind in a process group that it did not create."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import contextmanager, suppress
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


@contextmanager
def own_mesh():
    """Give each engine its own mesh. The pool of workers keeps one per layout for all its tasks."""
    with (
        mock.patch.object(mesh, "init_device_mesh", init_device_mesh),
        mock.patch.object(mesh, "end_groups", process_groups.end_groups),
    ):
        yield


def resource_counts():
    """Return the numbers of open files and of threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def open_files_in(folder):
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is closed by now.
        with suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in paths if path.startswith(str(folder))]


def batches():
    return cases.ragged_steps(1, steps=1, keys=())[0]


def trained_engine(folder=None):
    """Return an engine after a step. With `folder` its shards and states are in files there."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": cases.OPTIMIZER,
        "parallel": {"measure_seconds": 0},
    }
    if folder is not None:
        files = {"device": "nvme", "nvme_path": str(folder)}
        config["zero_optimization"] = {
            "stage": 3,
            "offload_param": files,
            "offload_optimizer": files,
        }
    engine = cases.engine(cases.build("plain", tied=True), config)
    engine.train_batch(batches())
    return engine


def open_and_close(rank, world, folder):
    """Check open files and threads after engines were closed. Runs on every rank."""
    with own_mesh():
        trained_engine().close()
        before = resource_counts()
        for _ in range(5):
            trained_engine().close()
            assert resource_counts() == before

        # Closing one engine ends nothing of another, and closing it again does nothing.
        first = trained_engine()
        second = trained_engine()
        first.close()
        second.train_batch(batches())
        first.close()
        second.close()
        del first, second
        assert resource_counts() == before

        # Other tests leave engines open in this process.
        threads_before = set(threading.enumerate())

        def new_threads(prefix):
            threads = set(threading.enumerate()) - threads_before
            return [thread.name for thread in threads if thread.name.startswith(prefix)]

        engine = trained_engine(folder)
        assert open_files_in(folder)
        assert new_threads("plait-disk")
        engine.close()
        assert not open_files_in(folder)
        assert not new_threads("plait-")
        for parameter in engine.model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            assert torch.isfinite(local).all()
    dist.barrier()


def test_closed_engines_leave_no_files_and_threads(pool, tmp_path):
    pool.run(2, open_and_close, tmp_path)


def gather_in_two_engines(rank, world):
    """Gather the parameters of two engines of one layout in turn. Runs on every rank."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "parallel": {"tp": 2, "measure_seconds": 0},
    }
    with own_mesh():
        for _ in range(2):
            engine = cases.engine(cases.build("llama", tied=True), config)
            for parameter in engine.model.parameters():
                if isinstance(parameter, DTensor):
                    assert parameter.detach().full_tensor().shape == parameter.shape
            engine.close()
    dist.barrier()


def test_a_second_engine_gathers_over_its_own_groups(pool):
    """torch caches results of operators by the shape of a mesh.

    `full_tensor` must not use the groups of the engine that was closed.
    """
    pool.run(4, gather_in_two_engines)


def living_models(rank, world):
    """Return the cases in which a model outlives its engine. Runs on every rank."""
    alive = []
    for start in (plait.initialize, plait.parallelize):
        for stage in (0, 2, 3):
            model = cases.build("plain", tied=True)
            owner = start(model, settings(2, stage, 1, 1))
            loss = model(batches()[0]["input_ids"]).logits.sum()
            if start is plait.initialize:
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
                alive.append((start.__name__, stage))
    return alive


def test_a_trained_model_is_freed(pool):
    """Hooks on gradients could keep the model and the states of its optimizer alive."""
    assert pool.run(2, living_models) == [[], []]
