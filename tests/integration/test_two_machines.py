"""`plait train` on two machines: two network namespaces with an address each, one command in both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.two_nodes.network import ADDRESSES, INTERFACE, NoLab, lab
from tests.integration.tiny import llama

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]
FILE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": llama(),
    "data": {"source": "files", "paths": ["text.txt"], "sequence_length": 32, "vocab_size": 300},
}


def test_two_machines_train_one_run(tmp_path):
    (tmp_path / "text.txt").write_text(
        "The ranks of two machines meet, sum and go on. " * 4000, encoding="utf-8"
    )
    (tmp_path / "run.json").write_text(
        json.dumps(FILE | {"run": {"folder": "runs/two", "steps": 3}}), encoding="utf-8"
    )
    # Both namespaces have this machine's name, so each is given its number, and gloo its interface.
    meet = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        ADDRESSES[0],
        "--master-port",
        "29517",
    )
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
    try:
        with lab() as machines:
            running = [
                subprocess.Popen(
                    [
                        *["ip", "netns", "exec"],
                        node,
                        sys.executable,
                        *["-m", "plait", "train", "run.json"],
                        *meet,
                        "--node-rank",
                        str(rank),
                    ],
                    cwd=tmp_path,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank, node in enumerate(machines.nodes)
            ]
            said = [process.communicate(timeout=200)[0] for process in running]
    except NoLab as missing:
        pytest.skip(str(missing))
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)
    assert any("2 processes" in text for text in said), said
    steps = [
        json.loads(line)
        for line in (tmp_path / "runs/two/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert any(row.get("step") == 3 for row in steps)
