"""Time that the two settings of host memory save on a CPU.

    python -m benchmarks.host_memory [--quick]

They are huge pages for weights, and freed memory that stays with the process. Times are those of
the processor (user and system), which other programs change little. A setting that saves less than
2 % is not worth its code.
"""

import json
import os
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

import numpy as np
import torch

import plait
from benchmarks.common.command import command
from benchmarks.common.report import store
from plait.cluster import host_memory

WORTH = 0.02
STEPS = "PLAIT_BENCHMARK_STEPS"
"""Environment variable of the processes that train: the number of counted steps."""
UNCOUNTED = 3


def products(rounds: int) -> dict[str, float]:
    """Multiply one token with 24 matrices of 16 MiB, in memory of both kinds in turn."""
    torch.set_num_threads(1)
    plain = [torch.empty(2048, 2048).normal_() for _ in range(24)]
    empty = host_memory.empty_on_huge_pages
    huge = [empty((2048, 2048), torch.float32).copy_(weight) for weight in plain]
    token = torch.randn(1, 2048)

    def seconds(weights: list[torch.Tensor]) -> float:
        began = time.process_time()
        for weight in weights:
            torch.nn.functional.linear(token, weight)
        return time.process_time() - began

    pairs = [(seconds(plain), seconds(huge)) for _ in range(UNCOUNTED + rounds)]
    before, after = np.array(pairs[UNCOUNTED:]).T
    return {
        "plain_seconds": float(np.median(before)),
        "huge_seconds": float(np.median(after)),
        "saved": float(1 - 1 / np.median(before / after)),
    }


def train(steps: int, *, keeps_freed: bool) -> dict[str, float]:
    """Train at ZeRO 2 on two ranks, and return the seconds and page faults per step of a rank."""
    environment = {**os.environ, STEPS: str(steps)}
    if not keeps_freed:
        # Plait leaves the allocator alone if the environment configures it. This is the default
        # of glibc.
        environment["MALLOC_TOP_PAD_"] = "131072"
    launch = ["-m", "plait", "launch", "--nproc-per-node", "2", "-m", "benchmarks.host_memory"]
    command_line = [sys.executable, *launch]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if "system_seconds" in line)
    row: dict[str, float] = json.loads(line[line.index("{") :])
    return row


def train_rank(counted: int) -> None:
    """Train on one rank. Rank 0 prints its seconds and page faults per step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=256,
    )
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine = plait.initialize(LlamaForCausalLM(config), settings, loss_fn=plait.causal_lm_loss)
    ids = torch.randint(0, 8000, (4, 128))
    rows = []
    for _ in range(UNCOUNTED + counted):
        before = resource.getrusage(resource.RUSAGE_SELF)
        engine.train_batch({"input_ids": ids, "labels": ids})
        after = resource.getrusage(resource.RUSAGE_SELF)
        system = after.ru_stime - before.ru_stime
        seconds = after.ru_utime - before.ru_utime + system
        rows.append((seconds, system, after.ru_minflt - before.ru_minflt))
    seconds, system, faults = map(median, zip(*rows[UNCOUNTED:], strict=True))
    if engine.rank == 0:
        print(json.dumps({"seconds": seconds, "system_seconds": system, "page_faults": faults}))
    engine.close()


def main() -> None:
    if STEPS in os.environ:
        train_rank(int(os.environ[STEPS]))
        return
    quick = command("host_memory", __doc__).parse_args().quick
    steps, rounds = (1, 3) if quick else (9, 57)
    returned = train(steps, keeps_freed=False)
    reused = train(steps, keeps_freed=True)
    saved = 1 - reused["seconds"] / returned["seconds"]
    results: dict[str, Any] = {
        "huge_pages": products(rounds),
        "freed_memory": {"returned": returned, "kept": reused, "saved": saved},
    }
    for name, row in results.items():
        is_worth_it = row["saved"] >= WORTH
        print(f"{name}: {row['saved']:.1%} of the time saved, worth its code: {is_worth_it}")
    if not quick:
        store("host_memory", results, "torch", "transformers")


if __name__ == "__main__":
    main()
