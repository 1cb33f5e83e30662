"""How often a script that ends well exits with SIGABRT: pairs of processes, each a user's small script with one step, then the
interpreter's own end.

    python tools/exit_codes.py RUNS [--way close,open,raw] [--stage 0,2] [--launch]

`close` calls engine.close(), `open` does not; `raw` is torch's fully_shard and destroy_process_group without Plait. Processes are forks of
this one, which has torch in memory and has started nothing; with --launch each pair is a `plait launch` of a file instead (slow).
Adds to benchmarks/results/exit_codes.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

RESULT = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "exit_codes.json"

PLAIT = """
import torch, plait
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
config = {{"train_micro_batch_size_per_gpu": 2, "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-2}}}}}}
engine = plait.initialize(model, config | {{"zero_optimization": {{"stage": {stage}}}}})
loss = engine(torch.randn(2, 64)).pow(2).mean()
engine.backward(loss)
engine.step()
{end}
"""
RAW = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.manual_seed(0)
dist.init_process_group("gloo")
model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss = model(torch.randn(2, 64)).pow(2).mean()
loss.backward()
optimizer.step()
dist.destroy_process_group()
"""


def script(way: str, stage: int) -> str:
    """The user's."""
    return (
        RAW
        if way == "raw"
        else PLAIT.format(stage=stage, end="engine.close()" if way == "close" else "")
    )


def forked(text: str) -> list[int] | str:
    """The exit codes of two ranks; in a child, `text`, which is then to be run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            places = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": 2,
                "LOCAL_WORLD_SIZE": 2,
                "MASTER_PORT": port,
            }
            os.environ.update(
                {name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1"
            )
            return text
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def launched(text: str) -> list[int]:
    """The exit code of `plait launch`, 134 or -6 where a rank was aborted."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(text)
        file.flush()
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "from plait.cli.main import main; main()",
            "launch",
            "--nproc-per-node",
            "2",
            file.name,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [-signal.SIGABRT if "SIGABRT" in done.stderr + done.stdout else done.returncode]


def count(runs: int, way: str, stage: int, *, launch: bool) -> str | None:
    """Run and write down; in a child, the script."""
    codes: Counter[str] = Counter()
    for _ in range(runs):
        found = launched(script(way, stage)) if launch else forked(script(way, stage))
        if isinstance(found, str):
            return found
        codes["SIGABRT" if -signal.SIGABRT in found else "0" if not any(found) else str(found)] += 1
    import torch

    entry = {
        "way": way,
        "stage": None if way == "raw" else stage,
        "launch": launch,
        "runs": runs,
        "exits": dict(codes),
        "torch": torch.__version__,
    }
    print(json.dumps(entry), flush=True)
    before = json.loads(RESULT.read_text()) if RESULT.exists() else []
    RESULT.write_text(json.dumps([*before, entry], indent=1) + "\n")
    return None


def main() -> str | None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="Exit codes of scripts that end well.")
    parser.add_argument("runs", type=int)
    parser.add_argument("--way", default="close,open,raw")
    parser.add_argument("--stage", default="0,2")
    parser.add_argument("--launch", action="store_true")
    given = parser.parse_args()
    if not given.launch:
        for name in (
            "plait.engine.build",
            "plait.verify.parity",
            "torch._dynamo",
            "torch.fx.experimental.symbolic_shapes",
            "torch.distributed.fsdp",
        ):
            importlib.import_module(name)  # what a step imports
    for way in given.way.split(","):
        for stage in given.stage.split(",")[: 1 if way == "raw" else None]:
            found = count(given.runs, way, int(stage), launch=given.launch)
            if found is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                return found
    return None


if __name__ == "__main__":
    SCRIPT = main()
    if SCRIPT is not None:
        exec(
            SCRIPT
        )  # at the module's level, as the user's: what it makes lives until the interpreter ends
