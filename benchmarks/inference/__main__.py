"""Time of generation by a Llama of 190 M parameters (float32, one thread), and its peak memory.

    python -m benchmarks.inference [--quick]    some minutes on a quiet machine

- in memory: Plait and Transformers
- from disk, with a fifth of the weights' size as budget and files out of the kernel's page cache:
  Plait and accelerate
- from host memory: Plait with the same budget and files in the page cache, accelerate's
  `cpu_offload`, and DeepSpeed's ZeRO-Inference if it is installed
- overlap, with 64 prompts: reads that take a third of the computation's time, as long, and three
  times as long; the time divided by the longer of the two of every pass
- memory: the peak at ten budgets of a model with three times the layers, and its tokens, which must
  be the same at all of them
"""

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.command import command
from benchmarks.common.report import ROOT, store

REQUESTS = 4
TOKENS = 8
OVERLAPPED = 64
"""Requests whose tokens take long enough that memory can be copied in a third of the time."""
TURNS = 5
LAYERS = 16
DEEP_LAYERS = 48
BUDGETS = (0.07, 0.075, 0.08, 0.09, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2)
"""Shares of the deep model's bytes. Two layers, of which one is read while the other computes, are
0.04."""
Row = dict[str, Any]


def make_model(folder: Path, layers: int) -> int:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.05,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


def run(folder: Path, engine: str, **options: Any) -> Row:
    text = json.dumps({"requests": REQUESTS, "tokens": TOKENS, **options})
    module = "benchmarks.inference.engines"
    command_line = [sys.executable, "-m", module, str(folder), engine, text]
    done = subprocess.run(command_line, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{engine} {text} failed:\n{done.stderr[-2000:]}")
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def quickest(rows: list[Row]) -> Row:
    return min(rows, key=lambda row: row["seconds"])


def engines(folder: Path, disk: Path, budget: int) -> tuple[dict[str, Row], float]:
    """Return the runs of all engines, and Transformers' time divided by Plait's in memory."""
    theirs = []
    ours = []
    ratios = []
    for _ in range(TURNS):
        theirs.append(run(folder, "transformers"))
        ours.append(run(folder, "plait"))
        ratios.append(theirs[-1]["seconds"] / ours[-1]["seconds"])
    cold = {"drop": True, "rounds": 2}
    # A disk that others use has another rate at another time.
    from_disk = [run(folder, "plait", budget=budget, **cold) for _ in range(TURNS)]
    rows = {
        "Transformers, in memory": quickest(theirs),
        "Plait, in memory": quickest(ours),
        "accelerate, from disk": run(folder, "transformers", disk=str(disk), **cold),
        "Plait, from disk": quickest(from_disk),
        "Plait, files in the cache": run(folder, "plait", budget=budget),
        "accelerate, cpu_offload": run(folder, "transformers", host=True),
    }
    if find_spec("deepspeed") is not None:
        rows["DeepSpeed ZeRO-Inference, host memory"] = run(folder, "deepspeed")
    return rows, median(ratios)


def overlap(folder: Path, budget: int) -> dict[str, Row]:
    """Return the times with slow reads, relative to the longer of reading and computation."""
    resident = run(folder, "plait", requests=OVERLAPPED)
    first = resident["first_seconds"]
    later = (resident["seconds"] - first) / (TOKENS - 1)
    streamed = run(folder, "plait", budget=budget, rounds=1, requests=OVERLAPPED)
    results = {}
    for name, share in (("1:3", 1 / 3), ("1:1", 1.0), ("3:1", 3.0)):
        reading = share * resident["seconds"]
        rate = streamed["read_bytes"] / reading
        options = {"budget": budget, "rate": rate, "rounds": 2, "requests": OVERLAPPED}
        seconds = run(folder, "plait", **options)["seconds"]
        # The prompts are one pass over the weights, and take longer than a token.
        each = reading / TOKENS
        longer = max(first, each) + (TOKENS - 1) * max(later, each)
        ratios = {"of_the_longer": seconds / longer, "of_the_rate": reading / seconds}
        results[name] = {"seconds": seconds, **ratios}
    return results


def main() -> int:
    quick = command("inference", __doc__).parse_args().quick
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build) as place:
        folder = Path(place) / "model"
        disk = Path(place) / "offload"
        disk.mkdir()
        size = make_model(folder, 4 if quick else LAYERS)
        if quick:
            print("transformers", run(folder, "transformers", rounds=1))
            print("plait", run(folder, "plait", rounds=1))
            print("plait within a budget", run(folder, "plait", rounds=1, budget=size * 3 // 4))
            return 0
        budget = size // 5
        rows, in_memory = engines(folder, disk, budget)
        # Keys, values and activations of more requests are part of the budget.
        overlaps = overlap(folder, 2 * budget)
        deep = Path(place) / "deep"
        deep_size = make_model(deep, DEEP_LAYERS)
        budgets = {}
        peaks = []
        for share in BUDGETS:
            within = round(deep_size * share)
            row = run(deep, "plait", budget=within, rounds=1)
            budgets[str(within)] = row
            peaks.append(row["peak_bytes"] / within)
        unlimited = run(deep, "plait", rounds=1)
    same = True
    for group in (rows.values(), [unlimited, *budgets.values()]):
        answers = {str(row.pop("tokens")) for row in group}
        same = same and len(answers) == 1

    def time_ratio(engine: str, divisor: str) -> float:
        return float(rows[engine]["seconds"] / rows[divisor]["seconds"])

    ratios = {
        "in memory, Transformers' time over Plait's": in_memory,
        "from disk, accelerate's time over Plait's": time_ratio(
            "accelerate, from disk", "Plait, from disk"
        ),
        "host memory, accelerate's time over Plait's from the cache": time_ratio(
            "accelerate, cpu_offload", "Plait, files in the cache"
        ),
        "highest peak over its budget": max(peaks),
    }
    for name, row in rows.items():
        rate = REQUESTS * TOKENS / row["seconds"]
        peak = row["peak_bytes"] / 2**20
        print(
            f"{name:40} {rate:7.2f} tokens/s, first token {row['first_seconds']:.2f} s, "
            f"peak {peak:6.0f} MiB"
        )
    for name, row in overlaps.items():
        print(f"reads to computation {name}: {row['of_the_longer']:.2f} x the longer of the two")
    for name, value in ratios.items():
        print(f"{name}: {value:.2f}")
    print(f"tokens are the same everywhere: {same}")
    content = {
        "weights_bytes": size,
        "requests": REQUESTS,
        "tokens": TOKENS,
        "engines": rows,
        "overlap": overlaps,
        "ratios": ratios,
        "deep_weights_bytes": deep_size,
        "budgets": budgets,
        "same_tokens": same,
    }
    store("inference", content, "torch", "transformers", "accelerate")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
