"""`plait train` on two machines: one command in each of two network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.two_nodes.network import ADDRESSES, INTERFACE, NoLab, lab
from tests.integration.json_lines import rows_of_run
from tests.integration.tiny import llama

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": llama(),
    "data": {"source": "files", "paths": ["text.txt"], "sequence_length": 32, "vocab_size": 300},
    "run": {"folder": "runs/two", "steps": 3},
}
# Both namespaces have the name of this machine, so each gets its number.
TRAIN = f"""
    -m plait train run.json --nnodes 2 --nproc-per-node 1
    --master-addr {ADDRESSES[0]} --master-port 29517 --node-rank
"""


def test_two_machines_train_one_run(tmp_path):
    text = "The ranks of two machines meet, sum and go on. " * 4000
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    (tmp_path / "run.json").write_text(json.dumps(CONFIG), encoding="utf-8")

    def start(node, rank):
        return subprocess.Popen(
            ["ip", "netns", "exec", node, sys.executable, *TRAIN.split(), str(rank)],
            cwd=tmp_path,
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    try:
        with lab() as machines:
            processes = [start(node, rank) for rank, node in enumerate(machines.nodes)]
            outputs = [process.communicate(timeout=200)[0] for process in processes]
    except NoLab as missing:
        pytest.skip(str(missing))
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert any("2 processes" in output for output in outputs), outputs
    assert rows_of_run(tmp_path / "runs/two", "step")[-1]["step"] == 3
