"""A training step and a checkpoint of 64 ranks on one machine.

    python -m tests.integration.many_processes FOLDER

test_many_processes.py runs it. Torch and Plait are imported once and the ranks are forked, which
saves memory and time. A process may fork only before its first backward, because the threads of
autograd do not survive a fork. Each rank joins a TCP store, creates every group of a layout with
four mesh dimensions, trains one step, writes its shards of a checkpoint, reports its results in
`FOLDER/rank-<n>.json`, and ends.
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
import plait.engine.build  # before the forks, because `plait` imports the engine at its first use
from plait.cluster.process_groups import end_process
from plait.verify.keep_float64 import keeping_float64
from tests.parity import cases

DEGREES = {"pp": 2, "dp_replicate": 4, "dp_shard": 4, "tp": 2}
RANKS = 64
SLICES = 16
"""Number of data-parallel ranks."""
ACCUMULATION = 2
CLIPPING = 0.5
SECONDS = 240
"""Time after which ranks are killed."""


def configuration(**parallel):
    """Return the configuration with the given degrees."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": 2 if parallel else 0},
        "optimizer": cases.OPTIMIZER,
        "parallel": parallel,
    }


def build():
    """Build a float64 Llama of twenty thousand parameters, which is the same in every process."""
    return cases.build("llama", tied=False, device="cpu")


def batches():
    """Return the micro-batches of the step over all ranks, which differ in length and targets."""
    return cases.ragged_steps(SLICES * ACCUMULATION, steps=1)[0]


def work(model, folder):
    """Run one rank from the rendezvous to the end of its process group."""
    if os.environ["RANK"] != "0":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # rank 0 has to broadcast its weights
    with keeping_float64(model):
        engine = plait.initialize(model, configuration(**DEGREES), loss_fn=plait.causal_lm_loss)
        start = engine.mesh.dp_index * ACCUMULATION
        result = engine.train_batch(batches()[start : start + ACCUMULATION])
    engine.save_checkpoint(folder / "checkpoints", client_state={"ranks": RANKS})
    report = {
        "loss": float(result.loss),
        "norm": float(result.grad_norm),
        "steps": engine.global_steps,
        **engine.mesh.coordinates,
    }
    engine.close()
    return {**report, "bytes": memory_bytes()}


def memory_bytes():
    """Return the private memory of this process and its part of shared pages, or 0 if unknown."""
    rollup = Path("/proc/self/smaps_rollup")
    lines = rollup.read_text().splitlines() if rollup.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def run_rank(index, port, model, folder):
    """Runs in a forked process and never returns."""
    variables = {
        "RANK": index,
        "LOCAL_RANK": index,
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    code = 1
    try:
        (folder / f"rank-{index}.json").write_text(json.dumps(work(model, folder)))
        code = 0
    except BaseException:
        print(f"rank {index}:\n{traceback.format_exc()}", file=sys.stderr, end="")
    end_process(code)


def main(folder):
    """Fork the ranks and wait for them. Return 0 if all of them ended with 0."""
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
            run_rank(index, port, model, folder)
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
        codes = {index: code for index, code in failed.items() if code != -signal.SIGKILL}
        message = "ranks failed; exit codes of those that were not killed, by rank"
        print(f"{len(failed)} {message}: {codes}", file=sys.stderr)
        return 1
    used = sum(json.loads(path.read_text())["bytes"] for path in folder.glob("rank-*.json"))
    print(f"{RANKS} processes, {time.monotonic() - began:.1f} s, {used / 2**30:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
