"""Pools of gloo workers that live for a test session: starting processes is paid once for every world size, importing torch once for all.

`pool.run(world_size, function, *args)` calls a module-level `function(rank, world_size, *args)` in every worker and returns the results
by rank. The workers of a world size share one default process group, which `function` finds and must not destroy (torch caches by mesh,
so a group that came and went would be remembered). A worker that raises fails the test with its traceback; a hang is ended by killing the
workers.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing as mp

TASKS_OF_A_WORKER = 12
"""Every task makes sub-groups, which hold sockets and threads that wake a hundred times a second; workers are renewed after this many."""
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
    "torch.fx.experimental.symbolic_shapes",
    "transformers.models.llama.modeling_llama",
)
"""Imported by the process that workers are forked from, which does nothing else: ten seconds less for four of them."""
SECONDS = 180


class WorkerFailed(AssertionError):
    """A function raised in a worker; the message is its traceback."""


def _serve(connection: Connection, rank: int, world_size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    while True:
        task = connection.recv()
        if task is None:
            dist.destroy_process_group()
            return
        function, args = task
        try:
            torch.manual_seed(0)
            connection.send((True, function(rank, world_size, *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class _Crew:
    """The workers of one world size."""

    def __init__(self, world_size: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.world_size, self.tasks = world_size, 0
        handle, self._store = tempfile.mkstemp(prefix="plait-store-")
        os.close(handle)
        os.unlink(self._store)
        self._processes, self._connections = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, self._store), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        self.tasks += 1
        for connection in self._connections:
            connection.send((function, args))
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        results: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                raise WorkerFailed(f"no answer within {timeout} s from ranks {sorted(waiting.values())}")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    ok, value = connection.recv()  # type: ignore[union-attr]
                except EOFError as error:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    raise WorkerFailed(f"rank {rank} of {self.world_size} died (exit code {code}; a signal is negative)") from error
                if not ok:
                    raise WorkerFailed(f"rank {rank} of {self.world_size}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def stop(self, *, kill: bool) -> None:
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
        if os.path.exists(self._store):
            os.unlink(self._store)


class Pool:
    """Crews are started when first needed, and anew after a failure."""

    def __init__(self) -> None:
        self._crews: dict[int, _Crew] = {}

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = SECONDS) -> list[Any]:
        """Results by rank. `timeout` in seconds for the whole call."""
        crew = self._crews.get(world_size)
        if crew is not None and crew.tasks >= TASKS_OF_A_WORKER:
            self._crews.pop(world_size).stop(kill=False)
            crew = None
        if crew is None:
            crew = self._crews[world_size] = _Crew(world_size)
        try:
            return crew.run(function, args, timeout)
        except WorkerFailed:
            self._crews.pop(world_size).stop(kill=True)  # the others may wait in a collective for ever
            raise

    def close(self) -> None:
        """Stop all workers."""
        for crew in self._crews.values():
            crew.stop(kill=False)
        self._crews = {}
