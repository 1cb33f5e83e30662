"""Pools of gloo workers that live for a test session.

`pool.run(world_size, function, *args)` calls a module-level `function(rank, world_size, *args)` in
every worker and returns the results by rank. The workers of a world size share one default process
group, which `function` uses and must not destroy (torch caches by mesh and would return the
destroyed group), and one mesh per layout. A worker that raises fails the test with its traceback. A
hang is ended by killing the workers.

A test with several processes costs the time of one rank times the number of ranks. An engine of a
tiny model and three steps take a third of a second. To keep a new test cheap:

- Ask first whether a unit test or one rank of a fake world (`tests/fake`) shows the same.
- Take two ranks, three if shards have to be uneven, and four if two mesh dimensions have to meet.
  Eight are for `make proof`.
- Pass a matrix to `tests.covers.cover`, so that `make test` runs the part in which every two values
  meet.
- Check several properties of one engine in one task.
- Take tiny models, one or two steps, and no more micro-batches than the question needs. The numbers
  of one process are computed once (`reference` in `data_parallel.py`, `tensor_parallel.py` and
  `pipelines.py` of `tests/parity`).
- Never sleep, and never judge by the clock, because another test runs on the same cores.
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
"""Tasks after which workers are replaced.

torch and its process groups never release everything, for example three open files per task.
"""
MOST_WORKERS = 10
"""Largest number of workers, because each has threads that wake a hundred times a second."""
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
    "transformers.models.gemma.modeling_gemma",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.gptj.modeling_gptj",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.opt.modeling_opt",
    "transformers.models.phi3.modeling_phi3",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.stablelm.modeling_stablelm",
)
"""Modules that the process imports that workers are forked from. Saves ten seconds for four."""
SECONDS = 180


class WorkerFailed(AssertionError):
    """A function raised in a worker; the message is its traceback."""


def _keep_groups():
    """Create process groups once per layout.

    Creating them takes longer than a step, and torch never frees their sockets and threads.
    """
    from plait.cluster import mesh

    split = mesh.split_by_node
    stages = mesh.Mesh.stages_group
    messages = mesh.Mesh.message_groups
    groups_by_key: dict[Any, Any] = {}

    def once(key, create):
        if key not in groups_by_key:
            groups_by_key[key] = create()
        return groups_by_key[key]

    def stages_group(self, which, *args, **options):
        # The options belong to the key: messages to lower stages and the gradients of tied weights
        # have a group each.
        key = ("stages", self.layout, repr(which), args, tuple(options.items()))
        return once(key, lambda: stages(self, which, *args, **options))

    mesh.end_groups = lambda groups: None  # the next task has the same mesh
    mesh.init_device_mesh = cache(mesh.init_device_mesh)
    mesh.split_by_node = lambda groups, nodes: once(
        (repr(groups), tuple(nodes)), lambda: split(groups, nodes)
    )

    def message_groups(self, count):
        def new():
            mesh.Mesh.stages_group = stages
            try:
                return messages(self, count)
            finally:
                mesh.Mesh.stages_group = stages_group

        return once(("messages", self.layout, count), new)

    mesh.Mesh.stages_group = stages_group
    mesh.Mesh.message_groups = message_groups


class _OneDevice(type):
    """Class of gloo groups that all use one device, in place of `ProcessGroupGloo`.

    A device has a thread that wakes a hundred times a second. A worker keeps its groups, and thirty
    such threads took a third of its time.
    """

    group = c10d.ProcessGroupGloo

    def __call__(cls, store, rank, size, *, timeout, **_):
        # torch 2.15 adds a keyword for groups whose ranks change, which no test uses.
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
    c10d.ProcessGroupGloo = _OneDevice("ProcessGroupGloo", (), {})


def _serve(connection, rank, world_size, port):
    import torch

    torch.set_num_threads(1)
    _keep_groups()
    _share_gloo_device()
    timeout = timedelta(seconds=SECONDS)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timeout)
    gc.freeze()  # collections after each task skip what was imported
    backend = "gloo"
    device = None
    if os.environ.get("SIMULATED_DEVICE"):  # tests/simulated_device
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", rank)
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
        gc.collect()  # cycles of the previous task keep memory that ranks share
        try:
            torch.manual_seed(0)
            connection.send((True, function(rank, world_size, *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


def quick_starts():
    """Return a multiprocessing context whose processes start with everything imported."""
    # The sums of MKL otherwise depend on the alignment of memory, which differs between runs. Tests
    # compare bits.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    # The watchdog of every worker reads torch's record of collectives twice a second. That takes
    # 0.1 s for the default of 2,000 entries, which was a sixth of the time of these tests.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class _Crew:
    """The workers of one world size."""

    def __init__(self, world_size):
        context = quick_starts()
        self.world_size = world_size
        self.tasks = 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes = []
        self._connections = []
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
                rank = waiting.pop(connection)
                try:
                    ok, value = connection.recv()
                except EOFError as error:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    raise WorkerFailed(
                        f"rank {rank} of {self.world_size} died "
                        f"(exit code {code}; a signal is negative)"
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
    """Starts the workers of a world size when they are first needed, and again after a failure."""

    def __init__(self):
        self._crews: dict[int, _Crew] = {}

    def run(self, world_size, function, *args, timeout=SECONDS):
        """Return the results by rank. `timeout` in seconds is for all ranks together."""
        crew = self._crews.pop(world_size, None)
        if crew is not None and crew.tasks >= TASKS_OF_A_WORKER:
            crew.stop(kill=False)
            crew = None
        if crew is None:
            while self._crews and sum(self._crews) + world_size > MOST_WORKERS:
                self._crews.pop(next(iter(self._crews))).stop(kill=False)
            crew = _Crew(world_size)
        self._crews[world_size] = crew  # moves it to the end; the first is stopped first
        try:
            return crew.run(function, args, timeout)
        except WorkerFailed:
            self.discard(world_size)  # the other ranks may wait in a collective forever
            raise

    def discard(self, world_size):
        """Kill the workers of one size, whose groups are unusable after a failure."""
        crew = self._crews.pop(world_size, None)
        if crew is not None:
            crew.stop(kill=True)

    def close(self):
        """Stop all workers."""
        for crew in self._crews.values():
            crew.stop(kill=False)
        self._crews = {}
