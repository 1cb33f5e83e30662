"""Pools of gloo workers that live for a test session: starting processes is paid once for every world size, importing torch once for all.

`pool.run(world_size, function, *args)` calls a module-level `function(rank, world_size, *args)` in every worker and returns the results
by rank. The workers of a world size share one default process group, which `function` finds and must not destroy (torch caches by mesh,
so a group that came and went would be remembered), and one mesh a layout. A worker that raises fails the test with its traceback; a hang
is ended by killing the workers.

A test between processes costs its ranks times what one of them does: an engine of a tiny model and three steps are a third of a second.
So, to add one cheaply:

- Ask first whether a unit test shows it, or one rank of a fake world (`tests/fake`).
- Take two ranks; three where shards have to be uneven, four where two axes have to meet. Eight are for `make proof`.
- Where a matrix is meant, give the whole of it to `tests.covers.cover`: `make test` runs the part in which every two values meet.
- Check several things of one engine in one task, rather than one thing in each of several.
- Tiny models, one or two steps, no more micro-batches than the question needs; one process's numbers are computed once
  (`reference` in `data_parallel.py`, `tensor_parallel.py` and `pipelines.py` of `tests/parity` keeps them).
- Never sleep, and never judge by the clock: another test runs on the same cores.
"""

from __future__ import annotations

import gc
import os
import traceback
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d as c10d

TASKS_OF_A_WORKER = 36
"""Workers are renewed after this many, since torch and its groups never give everything back (some three open files per task)."""
MOST_WORKERS = 10
"""That wait for a task: each has threads that wake a hundred times a second."""
PRELOADED = (
    "accelerate",
    "plait",
    "plait.checkpoint",
    "plait.engine.build",
    "plait.verify.parity",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.fx.experimental.symbolic_shapes",
    "transformers.trainer",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in (
            "gemma",
            "gemma2",
            "gpt2",
            "gpt_neox",
            "gptj",
            "llama",
            "mistral",
            "opt",
            "phi3",
            "qwen3",
            "stablelm",
        )
    ),
)
"""Imported by the process that workers are forked from, which does nothing else: ten seconds less for four of them."""
SECONDS = 180


class WorkerFailed(AssertionError):
    """A function raised in a worker; the message is its traceback."""


def _keep_groups():
    """Groups are made once for every layout: making them takes longer than a step, and they hold sockets and threads for ever."""
    from plait.cluster import mesh

    make, split, stages, messages = (
        mesh.init_device_mesh,
        mesh.split_by_node,
        mesh.Mesh.stages_group,
        mesh.Mesh.message_groups,
    )
    kept: dict[Any, Any] = {}

    def once(key, made):
        if key not in kept:
            kept[key] = made()
        return kept[key]

    def stages_group(self, which, *args, **options):
        # By how they are written too: messages to lower stages and the gradients of tied weights have a group each.
        key = ("stages", self.layout, repr(which), args, tuple(options.items()))
        return once(key, lambda: stages(self, which, *args, **options))

    mesh.end_groups = lambda groups: None  # the next task has the same mesh
    mesh.init_device_mesh = cache(make)  # type: ignore[assignment]
    mesh.split_by_node = lambda groups, nodes: once(
        (repr(groups), tuple(nodes)), lambda: split(groups, nodes)
    )

    def message_groups(self, count):
        def new():
            mesh.Mesh.stages_group = stages  # type: ignore[method-assign]
            try:
                return messages(self, count)
            finally:
                mesh.Mesh.stages_group = stages_group  # type: ignore[method-assign]

        return once(("messages", self.layout, count), new)

    mesh.Mesh.stages_group = stages_group  # type: ignore[method-assign]
    mesh.Mesh.message_groups = message_groups  # type: ignore[method-assign]


class _OneDevice(type):
    """Class of gloo groups that all use one device, in place of `ProcessGroupGloo`.

    A device has a thread that wakes a hundred times a second. A worker keeps its groups, and thirty
    such threads took a third of its time.
    """

    group = c10d.ProcessGroupGloo

    def __call__(cls, store, rank, size, *, timeout, **_):
        # From torch 2.15 on there is a keyword for groups that change, which tests do not have.
        options = cls.group._Options()
        options._devices = [_gloo_device()]
        options._timeout = timeout
        return cls.group(store, rank, size, options)

    def __instancecheck__(cls, instance):
        return isinstance(instance, cls.group)


@cache
def _gloo_device():
    return c10d.ProcessGroupGloo.group.create_default_device()


def _share_gloo_device():
    c10d.ProcessGroupGloo = _OneDevice("ProcessGroupGloo", (), {})  # type: ignore[assignment,misc]


def _serve(connection, rank, world_size, port):
    import torch

    torch.set_num_threads(1)
    _keep_groups()
    _share_gloo_device()
    timeout = timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timeout)
    gc.freeze()  # what was imported is not looked through after every task
    backend, device = "gloo", None
    if os.environ.get("SIMULATED_DEVICE"):  # tests/simulated_device
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device
    )
    while True:
        task = connection.recv()
        if task is None:
            dist.destroy_process_group()
            return
        function, args = task
        gc.collect()  # what the last task left in cycles holds memory that ranks share
        try:
            torch.manual_seed(0)
            connection.send((True, function(rank, world_size, *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def quick_starts():
    """A context of multiprocessing whose processes have everything imported when they start."""
    # MKL's sums otherwise follow the alignment of memory, which is another from run to run; tests compare bits.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    # The watch of every worker reads torch's record of collectives twice a second: 0.1 s for the
    # 2,000 entries that it has by default, a sixth of the time of these tests.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class _Crew:
    """The workers of one world size."""

    def __init__(self, world_size):
        context = quick_starts()
        self.world_size, self.tasks = world_size, 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes, self._connections = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, self._store.port), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def run(self, function, args, timeout):
        self.tasks += 1
        for connection in self._connections:
            connection.send((function, args))
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        results: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                raise WorkerFailed(
                    f"no answer within {timeout} s from ranks {sorted(waiting.values())}"
                )
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    ok, value = connection.recv()  # type: ignore[union-attr]
                except EOFError as error:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    raise WorkerFailed(
                        f"rank {rank} of {self.world_size} died (exit code {code}; a signal is negative)"
                    ) from error
                if not ok:
                    raise WorkerFailed(f"rank {rank} of {self.world_size}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def stop(self, *, kill):
        for process, connection in zip(self._processes, self._connections, strict=True):
            if kill:
                process.kill()
            else:
                with suppress(BrokenPipeError, OSError):
                    connection.send(None)
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(10)
            if process.is_alive():
                process.kill()
            connection.close()


class Pool:
    """Crews are started when first needed, and anew after a failure."""

    def __init__(self):
        self._crews: dict[int, _Crew] = {}

    def run(self, world_size, function, *args, timeout=SECONDS):
        """Results by rank. `timeout` in seconds for the whole call."""
        crew = self._crews.pop(world_size, None)
        if crew is not None and crew.tasks >= TASKS_OF_A_WORKER:
            crew.stop(kill=False)
            crew = None
        if crew is None:
            while self._crews and sum(self._crews) + world_size > MOST_WORKERS:
                self._crews.pop(next(iter(self._crews))).stop(kill=False)
            crew = _Crew(world_size)
        self._crews[world_size] = crew  # the last one used stands last
        try:
            return crew.run(function, args, timeout)
        except WorkerFailed:
            self.discard(world_size)  # the others may wait in a collective for ever
            raise

    def discard(self, world_size):
        """Kill the workers of one size, whose groups are of no use after a failure."""
        crew = self._crews.pop(world_size, None)
        if crew is not None:
            crew.stop(kill=True)

    def close(self):
        """Stop all workers."""
        for crew in self._crews.values():
            crew.stop(kill=False)
        self._crews = {}
