"""Many tiny ranks on one machine: `python -m tests.integration.many_processes FOLDER` does a training step and a checkpoint with 64.

Torch and Plait are imported once and the ranks are forked, which keeps them cheap in memory and in time. A fork is safe only as long as
this process has run no backward (autograd's threads do not survive it), hence a program of its own, used by `test_many_processes.py`. Each
rank meets the others at a TCP store, makes every group of a layout that uses four axes, trains one step, writes its part of a
checkpoint, says what it found in `FOLDER/rank-<n>.json`, and leaves.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

import plait
import plait.engine.build  # all of Plait before the forks: `plait` alone imports the engine when it is first asked for
from plait.cluster.process_groups import end_process
from plait.verify.keep_float64 import keeping_float64
from tests.parity import cases

DEGREES = {"pp": 2, "dp_replicate": 4, "dp_shard": 4, "tp": 2}
RANKS = 64
SLICES = 16
"""Data-parallel slices of the batch."""
ACCUMULATION = 2
CLIPPING = 0.5
SECONDS = 240
"""Ranks that are not done by then are killed."""


def configuration(**parallel):
    """The configuration file, with the sections of `parallel` given."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": 2 if parallel else 0},
        "optimizer": cases.OPTIMIZER,
        "parallel": parallel,
    }


def build():
    """A Llama of some twenty thousand parameters, float64, on the CPU; the same in every process."""
    return cases.build("llama", tied=False, device="cpu")


def batches():
    """The micro-batches of the step over all slices: lengths and numbers of targets differ, one has no target."""
    return cases.ragged_steps(SLICES * ACCUMULATION, steps=1)[0]


def work(model, folder):
    """The life of one rank, from the rendezvous to the end of its process group."""
    if os.environ["RANK"] != "0":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # the weights have to come from rank 0
    with keeping_float64(model):
        engine = plait.initialize(model, configuration(**DEGREES), loss_fn=plait.causal_lm_loss)
        start = engine.mesh.dp_index * ACCUMULATION
        result = engine.train_batch(batches()[start : start + ACCUMULATION])
    engine.save_checkpoint(folder / "checkpoints", client_state={"ranks": RANKS})
    found = {
        "loss": float(result.loss),
        "norm": float(result.grad_norm),
        "steps": engine.global_steps,
        **engine.mesh.coordinates,
    }
    engine.close()
    return {**found, "bytes": own_bytes()}


def own_bytes():
    """This process's share of memory: pages of its own, and its part of those it shares. 0 where the kernel does not tell."""
    rollup = Path("/proc/self/smaps_rollup")
    lines = rollup.read_text().splitlines() if rollup.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def rank(index, port, model, folder):
    """Runs in a forked process and never returns."""
    place = {
        "RANK": index,
        "LOCAL_RANK": index,
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    code = 1
    try:
        (folder / f"rank-{index}.json").write_text(json.dumps(work(model, folder)))
        code = 0
    except BaseException:
        print(f"rank {index}:\n{traceback.format_exc()}", file=sys.stderr, end="")
    end_process(code)


def main(folder):
    """Fork the ranks and wait for them. 0 when all of them ended with 0."""
    began = time.monotonic()
    torch.set_num_threads(1)
    model = build()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = {}
    for index in range(RANKS):
        pid = os.fork()
        if pid == 0:
            rank(index, port, model, folder)
        running[pid] = index
    codes: dict[int, int] = {}
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() - began > SECONDS or any(codes.values()):
            for other in running:
                os.kill(other, signal.SIGKILL)
            time.sleep(0.1)
        else:
            time.sleep(0.05)
    failed = {index: code for index, code in sorted(codes.items()) if code}
    if failed:
        own = {index: code for index, code in failed.items() if code != -signal.SIGKILL}
        print(
            f"{len(failed)} ranks failed; exit codes of those that were not killed, by rank: {own}",
            file=sys.stderr,
        )
        return 1
    used = sum(json.loads(path.read_text())["bytes"] for path in folder.glob("rank-*.json"))
    print(f"{RANKS} processes, {time.monotonic() - began:.1f} s, {used / 2**30:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
