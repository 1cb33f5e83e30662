"""Times generation by a Llama of 190 M parameters (float32, one thread), and takes its peak of memory.

    python -m benchmarks.inference [--quick]    some minutes on a quiet machine

- in memory: Plait beside Transformers;
- from disk, a fifth of the weights' size as budget, files out of the kernel's cache: Plait beside accelerate; the share of the rate at
  which the disk gives the same file to as many reads at a time, into as much memory, and no computation; and the share of the rate at which
  it does so while Plait generates the same tokens from memory, for reads that nobody looks at;
- from host memory: Plait with the same budget and files in the kernel's cache, beside accelerate's `cpu_offload`, and DeepSpeed's
  ZeRO-Inference with parameters in host memory where DeepSpeed is installed;
- overlap, of 64 prompts: reads slowed down to a third of the computation's time, to its time, and to three times it; the time beside the
  longer of the two of every pass, and the share of that rate of reading which is reached;
- memory: the peak at ten budgets of a model of three times the layers, 5 to 14 times as large as the budget, and the tokens, which must be
  the same at all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.command import command
from benchmarks.common.report import store

REQUESTS, TOKENS = 4, 8
OVERLAPPED = 64
"""Requests whose tokens take so long that memory can be copied in a third of it."""
TURNS = 5
"""Of the measurements in memory, and of those from disk."""
SMALL = 8 << 20, 4 << 20
"""Bytes of memory that stay in the processor's cache, and of a read."""
LAYERS, DEEP = 16, 48
"""Of the model of the times, and of that of the budgets."""
BUDGETS = (0.07, 0.075, 0.08, 0.09, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2)
"""Shares of the deep model's bytes; two of its layers, of which one is read while the other computes, are 0.04."""


def made(folder: Path, layers: int) -> int:
    """Write a model; returns the bytes of its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        initializer_range=0.05, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


def run(folder: Path, engine: str, **asked: Any) -> dict[str, Any]:
    """One engine in a process of its own."""
    given = json.dumps({"requests": REQUESTS, "tokens": TOKENS, **asked})
    command = [sys.executable, "-m", "benchmarks.inference.engines", str(folder), engine, given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{engine} {given} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def disk_rate(folder: Path, count: int, *into: int) -> float:
    """Bytes/s of reading so many bytes past the kernel's cache, and nothing else; in a process of its own, since the pages of memory that
    it happens to get decide a tenth."""
    return count / run(folder, "reads", reads=count, into=into, drop=True, rounds=2)["seconds"]


def quickest(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs of one engine."""
    return min(rows, key=lambda row: row["seconds"])


def main() -> None:
    quick = command("inference", __doc__).parse_args().quick
    build = Path.cwd() / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as place:
        folder, disk = Path(place) / "model", Path(place) / "offload"
        disk.mkdir()
        size = made(folder, 2 if quick else LAYERS)
        if quick:
            for engine, asked in (("transformers", {}), ("plait", {}), ("plait", {"budget": size})):
                print(engine, asked, run(folder, engine, rounds=1, **asked))
            return
        budget = size // 5
        resident = [(run(folder, "transformers"), run(folder, "plait")) for _ in range(TURNS)]
        rows = {
            "Transformers, in memory": quickest(theirs for theirs, _ in resident),
            "Plait, in memory": quickest(ours for _, ours in resident),
            "accelerate, from disk": run(
                folder, "transformers", disk=str(disk), drop=True, rounds=2
            ),
            "Plait, files in the cache": run(folder, "plait", budget=budget),
            "accelerate, cpu_offload": run(folder, "transformers", host=True),
        }
        if find_spec("deepspeed") is not None:
            rows["DeepSpeed ZeRO-Inference, host memory"] = run(folder, "deepspeed")
        turns = []
        for _ in range(TURNS):  # a disk that others use has another rate at another time
            cold = run(folder, "plait", budget=budget, drop=True, rounds=2)
            both = run(folder, "plait", reads=cold["read_bytes"], drop=True, rounds=2)
            turns.append(
                (cold, both, *(disk_rate(folder, cold["read_bytes"], *how) for how in ((), SMALL)))
            )
        best = min(turns, key=lambda turn: turn[0]["seconds"])
        rows["Plait, from disk"], rows["Plait, in memory, beside reads of as many bytes"], *_ = best
        alone = [cold["read_bytes"] / cold["seconds"] / rate for cold, _, rate, _ in turns]
        overlapped = [both["seconds"] / cold["seconds"] for cold, both, *_ in turns]
        shares = {
            "from disk, share of the disk's rate": alone,
            "from disk, share of its rate overlapped with computation": overlapped,
        }
        whole = run(folder, "plait", requests=OVERLAPPED)
        first, later = (
            whole["first_seconds"],
            (whole["seconds"] - whole["first_seconds"]) / (TOKENS - 1),
        )
        wide = 2 * budget  # keys, values and activations of so many requests are part of it
        read, overlaps = (
            run(folder, "plait", budget=wide, rounds=1, requests=OVERLAPPED)["read_bytes"],
            {},
        )
        for name, share in (("1:3", 1 / 3), ("1:1", 1.0), ("3:1", 3.0)):
            total = share * whole["seconds"]
            found = run(
                folder, "plait", budget=wide, rate=read / total, rounds=2, requests=OVERLAPPED
            )
            # The prompts are one pass over the weights and take longer than a token; all passes read the same bytes.
            longer = max(first, total / TOKENS) + (TOKENS - 1) * max(later, total / TOKENS)
            seconds = found["seconds"]
            overlaps[name] = {
                "seconds": seconds,
                "of_the_longer": seconds / longer,
                "of_the_rate": total / seconds,
            }
        deep = Path(place) / "deep"
        deep_size = made(deep, DEEP)
        whole_deep = run(deep, "plait", rounds=1)
        budgets = {
            round(deep_size * share): run(deep, "plait", budget=round(deep_size * share), rounds=1)
            for share in BUDGETS
        }
    tokens = [
        {json.dumps(row.pop("tokens")) for row in group}
        for group in (rows.values(), (whole_deep, *budgets.values()))
    ]
    same = all(len(group) == 1 for group in tokens)
    ratios = {
        "in memory, Transformers' time over Plait's": median(
            theirs["seconds"] / ours["seconds"] for theirs, ours in resident
        ),
        "from disk, accelerate's time over Plait's": rows["accelerate, from disk"]["seconds"]
        / rows["Plait, from disk"]["seconds"],
        "host memory, accelerate's time over Plait's from the cache": rows[
            "accelerate, cpu_offload"
        ]["seconds"]
        / rows["Plait, files in the cache"]["seconds"],
        **{what: median(found) for what, found in shares.items()},
        "highest peak over its budget": max(
            row["peak_bytes"] / budget for budget, row in budgets.items()
        ),
    }
    for name, row in rows.items():
        rate = f"{REQUESTS * TOKENS / row['seconds']:7.2f} tokens/s, first token {row['first_seconds']:.2f} s"
        print(f"{name:48} {rate}, peak {row['peak_bytes'] / 2**20:6.0f} MiB")
    for name, row in overlaps.items():
        print(
            f"reads to computation {name}: {row['of_the_longer']:.2f} x the longer of the two, {row['of_the_rate']:.0%} of the rate"
        )
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    print(f"tokens are the same everywhere: {same}")
    content = {
        "weights_bytes": size,
        "disk_bytes_per_second": [rate for *_, rate, _ in turns],
        "disk_bytes_per_second_into_the_processors_cache": [rate for *_, rate in turns],
        "shares": shares,
        "requests": REQUESTS,
        "tokens": TOKENS,
        "engines": rows,
        "overlap": overlaps,
        "ratios": ratios,
        "deep_weights_bytes": deep_size,
        "budgets": {str(key): row for key, row in budgets.items()},
        "same_tokens": same,
    }
    store("inference", content, "torch", "transformers", "accelerate")
    sys.exit(not same)


if __name__ == "__main__":
    main()
