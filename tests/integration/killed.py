"""`plait train` on two processes, killed repeatedly until the run is complete.

test_killed.py runs it in a process. The ranks are forks of that process, which has torch in memory,
with the variables that a launcher sets. A rank is killed at the start of a given call of a
function, or at a random time. The other rank is killed then, as launchers do.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from plait.cli.main import main

PLACES = (
    ("plait.parallel.offload.arena.Arena.evict", 150),  # in a backward or in an update
    ("plait.parallel.offload.arena.Arena.fetch", 250),
    ("plait.optim.disk_optimizer.DiskTier._store_states", 20),  # between two chunks of an update
    ("plait.checkpoint.save.write_shards", 1),
    ("plait.checkpoint.save.write_shards", 2),
    ("plait.checkpoint.save.write_text", 1),  # after tensors and before their list
    ("plait.checkpoint.commit.publish", 1),
    ("plait.checkpoint.commit.replace_text", 1),  # after the rename and before LATEST
    ("plait.train.loop.remove_old", 2),
)
"""Functions, and the call of each that kills a rank."""
FIRST_ONLY = {name for name, _ in PLACES[-3:]}
"""Functions that only rank 0 calls."""
SECONDS = 120


def kill_at(function, count):
    """Return `function` with a counter whose call number `count` kills this process."""
    remaining = count

    def counted(*args, **kwargs):
        nonlocal remaining
        remaining -= 1
        if not remaining:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return counted


def fork_rank(index, port, arguments, place):
    """Fork one rank of the run, and return its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ |= {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if place is not None:
            path, name = place[0].rsplit(".", 1)
            owner = owner_of(path)
            setattr(owner, name, kill_at(getattr(owner, name), place[1]))
        main(["train", *arguments])
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException as error:
        print(f"rank {index}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def owner_of(path):
    """Return a module, or a class in a module."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        return getattr(owner_of(parent), name)


def attempt(arguments, metrics, *, place=None, victim=0, seconds=SECONDS):
    """Run both ranks, and return whether they ended well.

    Args:
        arguments: Arguments of `plait train`.
        metrics: File of metrics of the run.
        place: Function and call that kill the rank `victim`.
        victim: A rank.
        seconds: Time after the first write to `metrics` after which both ranks are killed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    before = modified(metrics)
    began = 0.0
    ranks = {}
    for index in range(2):
        pid = fork_rank(index, port, arguments, place if index == victim else None)
        ranks[pid] = index
    statuses = [0, 0]
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[ranks.pop(pid)] = status
        if not began and modified(metrics) != before:
            began = time.monotonic()
        if ranks and (any(statuses) or (began and time.monotonic() > began + seconds)):
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.005)
    # A rank that lost its peer may end with an error before it is killed.
    assert signal.SIGKILL in statuses or not any(statuses), statuses
    return not any(statuses)


def modified(metrics):
    """Return a number that changes when the file does."""
    return metrics.stat().st_mtime_ns if metrics.exists() else 0


def run(places, kills, folder, arguments):
    """Kill a run at the first `places` and at `kills` random times, and complete it.

    Returns:
        The names of the kills that came before the end of the run.
    """
    generator = random.Random(kills)
    arguments = [*arguments, "--set", f"run.folder={folder}"]
    metrics = Path(folder) / "metrics.jsonl"
    planned: list[tuple[str, dict[str, Any]]] = []
    for place in PLACES[:places]:
        victim = 0 if place[0] in FIRST_ONLY else 1
        planned.append((f"{place[0]} {place[1]}", {"place": place, "victim": victim}))
    for _ in range(kills):
        seconds = generator.uniform(0.05, 2.0)
        planned.append((f"{seconds:.2f} s", {"seconds": seconds}))

    completed_kills = []
    for name, options in planned:
        if not attempt(arguments, metrics, **options):
            completed_kills.append(name)
            print(f"killed: {name}", file=sys.stderr, flush=True)
    assert attempt(arguments, metrics)
    return completed_kills


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])))
