"""`plait train` on two processes, ended by SIGKILL again and again until it is done. Run by test_killed.py in a process of its own.

The processes are forks of one that has torch in memory, with the variables that a launcher sets. A death is a place (a function, and
which call of it ends the process before it begins) or a time; the other process is killed when one is gone, as launchers do.
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
    ("plait.parallel.offload.arena.Arena.evict", 150),  # a backward or a step over the files
    ("plait.parallel.offload.arena.Arena.fetch", 250),
    ("plait.optim.disk_optimizer.DiskTier._store_states", 20),  # between two chunks of a step
    ("plait.checkpoint.save.write_shards", 1),
    ("plait.checkpoint.save.write_shards", 2),
    ("plait.checkpoint.save.write_text", 1),  # tensors are written, the list of them is not
    ("plait.checkpoint.commit.publish", 1),
    ("plait.checkpoint.commit.replace_text", 1),  # renamed, not named
    ("plait.train.loop.remove_old", 2),
)
FIRST_ONLY = {name for name, _ in PLACES[-3:]}
"""What only rank 0 calls."""
SECONDS = 120


def dying(function, count):
    """`function`, whose call number `count` kills this process."""
    left = count

    def counted(*args, **kwargs):
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return counted


def rank(index, port, arguments, place):
    """One process of the run: a fork. Returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ |= {
            "RANK": str(index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if place is not None:
            path, name = place[0].rsplit(".", 1)
            owner = owner_of(path)
            setattr(owner, name, dying(getattr(owner, name), place[1]))
        main(["train", *arguments])
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException as error:
        print(f"rank {index}: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def owner_of(path):
    """A module, or a class or module inside of one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        return getattr(owner_of(parent), name)


def attempt(arguments, metrics, *, place=None, victim=0, seconds=SECONDS):
    """Whether the run ended well. `seconds` after it first wrote to `metrics` both processes are killed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    before, began = written(metrics), 0.0
    waiting = {
        rank(index, port, arguments, place if index == victim else None): index
        for index in range(2)
    }
    statuses = [0, 0]
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[waiting.pop(pid)] = status
        if not began and written(metrics) != before:
            began = time.monotonic()
        if waiting and (any(statuses) or (began and time.monotonic() > began + seconds)):
            for other in waiting:
                os.kill(other, signal.SIGKILL)
        time.sleep(0.005)
    assert signal.SIGKILL in statuses or not any(statuses), (
        statuses
    )  # who lost its peer may end with an error of its own
    return not any(statuses)


def written(metrics):
    """Changes when the file does."""
    return metrics.stat().st_mtime_ns if metrics.exists() else 0


def run(places, kills, folder, arguments):
    """Deaths at the first `places`, then at `kills` random times, and the run to its end. Returns those that came before its end."""
    chance, arguments, metrics = (
        random.Random(kills),
        [*arguments, "--set", f"run.folder={folder}"],
        Path(folder) / "metrics.jsonl",
    )
    planned: list[tuple[str, dict[str, Any]]] = [
        (f"{place[0]} {place[1]}", {"place": place, "victim": 0 if place[0] in FIRST_ONLY else 1})
        for place in PLACES[:places]
    ]
    for _ in range(kills):
        seconds = chance.uniform(0.05, 2.0)
        planned.append((f"{seconds:.2f} s", {"seconds": seconds}))
    deaths = []
    for name, death in planned:
        if not attempt(arguments, metrics, **death):
            deaths.append(name)
            print(f"killed: {name}", file=sys.stderr, flush=True)
    assert attempt(arguments, metrics)
    return deaths


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])))
