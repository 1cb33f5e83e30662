"""`plait plan infer` beside what generation takes, for models of random weights, in memory and streamed from files.

    python -m benchmarks.inference.predicted      some minutes on a quiet machine

A process predicts, and another one generates; each is run in turns, and medians are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.machine import facts
from plait.inference.deployment import Work, deploy, deploy_streamed
from plait.inference.generate import generate
from plait.inference.load import load_model
from plait.inference.quantised import quantised_copy
from plait.inference.source import open_source
from plait.inference.streamed import load_streamed
from plait.sharded.model import ShardedModel

RESULT = Path(__file__).parents[2] / "benchmarks/results/predicted_generation.json"
TURNS = 3
SIZES: dict[str, dict[str, int]] = {
    "1.6 M": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2},
    "100 M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12, "num_key_value_heads": 12},
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (size, name, options)
    for size in SIZES
    for name, options in (
        ("in memory", {"requests": 1}),
        ("in memory", {"requests": 4}),
        ("int8, in memory", {"requests": 1, "quant": "int8"}),
        ("int4, in memory", {"requests": 1, "quant": "int4"}),
        ("a third from files", {"requests": 1, "budget": 0.7}),
        ("most from files", {"requests": 4, "budget": 0.4}),
    )
]
PROMPT, NEW = 64, 32


def save(folder: Path, size: str) -> int:
    """Write a model; returns the bytes of its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=4096, initializer_range=0.05, eos_token_id=None, **SIZES[size])
    LlamaForCausalLM(config).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


def options_of(asked: dict[str, Any], weights: int) -> list[str]:
    """Of both commands."""
    room = (24 << 20) if weights > 1 << 26 else (3 + asked["requests"]) << 20  # for keys, values and activations
    budget = ["--cpu-budget", str(int(weights * asked["budget"]) + room)] if "budget" in asked else []
    return [*budget, *(["--quant", asked["quant"]] if "quant" in asked else [])]


def predicted(folder: Path, asked: dict[str, Any], weights: int) -> dict[str, float]:
    lengths = ["--prompt-tokens", str(PROMPT), "--new-tokens", str(NEW), "--requests", str(asked["requests"])]
    command = [sys.executable, "-m", "plait", "plan", "infer", "--model", str(folder), *lengths, *options_of(asked, weights), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)["predicted"]
    return found


def measured(folder: Path, asked: dict[str, Any], weights: int) -> dict[str, float]:
    """In a process of its own, as `plait generate` does it."""
    given = json.dumps([str(folder), asked["requests"], options_of(asked, weights)])
    done = subprocess.run([sys.executable, "-m", "benchmarks.inference.predicted", given], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def generating(folder: str, requests: int, options: list[str]) -> None:
    """Print the seconds to the first token, and from token to token."""
    source = open_source(Path(folder))
    chosen = dict(zip(options[::2], options[1::2], strict=True))
    form, budget = chosen.get("--quant"), chosen.get("--cpu-budget")
    counted = source.model() if form is None else quantised_copy(source.model(), form)
    work = Work(source, counted, PROMPT + NEW, requests, form is not None)
    if budget is None:
        deploy(work, tp=None, pp=None, devices=None)
        sharded = load_model(source, quant=form)
    else:
        found = deploy_streamed(work, cpu_budget=int(budget))
        assert found.account.in_files
        assert found.budget_bytes is not None
        sharded, _ = load_streamed(source, budget_bytes=found.budget_bytes, other_bytes=found.other_bytes, quant=form)
    prompts = [[(7 * at + row) % 4096 for at in range(PROMPT)] for row in range(requests)]
    turns = [timed(sharded, prompts) for _ in range(3)][1:]
    first, token = min(one for one, _ in turns), min(one for _, one in turns)
    print(json.dumps({"first_seconds": first, "token_seconds": token}), flush=True)
    sharded.close()


def timed(sharded: ShardedModel, prompts: list[list[int]]) -> tuple[float, float]:
    """Seconds to the first token, and from token to token."""
    times = [time.perf_counter()]

    def note(request: int, _: int) -> None:
        if not request:
            times.append(time.perf_counter())

    generate(sharded, prompts, max_new_tokens=NEW, temperature=0, on_token=note)
    return times[1] - times[0], (times[-1] - times[1]) / (NEW - 1)


def summary(row: dict[str, Any]) -> str:
    """For a person."""
    (token, first), count = (row["token_seconds"], row["first_seconds"]), row["requests"]
    return (
        f"{count / token['measured']:8.1f} tokens/s, predicted {count / token['predicted']:8.1f} ({1 / token['ratio']:.2f}); "
        f"first token {first['measured'] * 1000:7.1f} ms, predicted {first['predicted'] * 1000:7.1f} ({first['ratio']:.2f})"
    )


def main() -> None:
    if len(sys.argv) > 1:
        generating(*json.loads(sys.argv[1]))
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        weights = {size: save(Path(place) / size.replace(" ", ""), size) for size in SIZES}
        for size, name, asked in CASES:
            folder = Path(place) / size.replace(" ", "")
            turns = [(predicted(folder, asked, weights[size]), measured(folder, asked, weights[size])) for _ in range(TURNS)]
            row: dict[str, Any] = {"model": size, "case": name, "requests": asked["requests"]}
            for key in ("first_seconds", "token_seconds"):
                row[key] = {
                    "predicted": median(one[key] for one, _ in turns),
                    "measured": median(other[key] for _, other in turns),
                    "ratio": median(one[key] for one, _ in turns) / median(other[key] for _, other in turns),
                }
            rows.append(row)
            print(f"{size:6} {name:20} {asked['requests']} requests: {summary(row)}", flush=True)
    RESULT.write_text(json.dumps({"machine": facts("torch", "transformers"), "prompt": PROMPT, "new": NEW, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
