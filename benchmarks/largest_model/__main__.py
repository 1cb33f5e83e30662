"""The command: `python -m benchmarks.largest_model`. For every baseline, the most layers of a Llama that one device trains, and tokens a
second there and at the most that all of them train.

On a GPU the device's memory is the limit, Plait and DeepSpeed keep master weights and states on the host. On CPUs the limit is
`--memory-gib` of anonymous memory, and Plait keeps them in files. Every attempt is a process of its own. Prints a table and writes
`results/largest_model_<device>.json`. Exit code 0, 1 when a baseline failed for another reason than memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machine import facts
from benchmarks.common.table import aligned
from benchmarks.largest_model.search import largest
from benchmarks.largest_model.worker import OUT_OF_MEMORY
from plait.errors import InputError
from plait.planner.hardware import device as device_of
from plait.sizes import GIB

RESULTS = Path(__file__).parents[1] / "results"
TITLES = {
    "torch": "torch, all on the device",
    "plait": "Plait, ZeRO 3 with offload",
    "deepspeed": "DeepSpeed, ZeRO 3 with offload",
}
HEADER = (
    "engine",
    "layers",
    "parameters",
    "tokens/s",
    "of peak",
    "tokens/s at {} layers",
    "peak GiB",
)


@dataclass(frozen=True)
class Attempt:
    """What a worker is told."""

    baseline: str
    model: dict[str, Any]
    micro_batch: int
    sequence: int
    steps: int
    memory_bytes: int
    """Of anonymous memory; 0 sets no limit."""
    folder: str


class Failed(RuntimeError):
    """A attempt ended for another reason than memory."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    on_gpu = torch.cuda.is_available()
    options = _parse(arguments, on_gpu=on_gpu)
    names = [
        name
        for name in options.baselines
        if name != "deepspeed" or (on_gpu and find_spec("deepspeed") is not None)
    ]
    for name in set(options.baselines) - set(names):
        say(f"{TITLES[name]} is left out: it needs a GPU, and to be installed")
    found: dict[str, dict[str, Any]] = {}
    failures: dict[str, str] = {}
    for name in names:
        tried: dict[int, dict[str, Any]] = {}

        def fits(layers: int, name: str = name, tried: dict[int, dict[str, Any]] = tried) -> bool:
            answer = _try(name, layers, options)
            say(
                f"{TITLES[name]}: {layers} layers {'train' if answer is not None else 'do not fit'}"
            )
            if answer is not None:
                tried[layers] = answer
            return answer is not None

        try:
            most = largest(fits, least=2, most=options.most_layers)  # one block repeats nothing
            if most:
                found[name] = {"layers": most, **tried[most]}
        except Failed as failure:
            failures[name] = str(failure)
            say(f"{TITLES[name]} failed: {failure}")
    common = min((one["layers"] for one in found.values()), default=0)
    for name, one in found.items():
        one["at_common"] = _try(name, common, options) if one["layers"] != common else dict(one)
    print(
        aligned(
            [title.format(common) for title in HEADER],
            [_row(name, one, options) for name, one in found.items()],
        )
    )
    document = {
        "machine": facts("torch", "transformers", "deepspeed", "plait"),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "options": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
        },
        "common_layers": common,
        "found": found,
        "failures": failures,
    }
    if not options.quick:
        path = RESULTS / f"largest_model_{'gpu' if on_gpu else 'cpu'}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        say(f"written: {path}")
    return 1 if failures else 0


def say(line: str) -> None:
    """Progress, on stderr, so that stdout holds the table."""
    print(line, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str] | None, *, on_gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.largest_model", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--baselines", nargs="+", choices=list(TITLES), default=list(TITLES), metavar="NAME"
    )
    parser.add_argument("--hidden", type=int, default=8192 if on_gpu else 512)
    parser.add_argument("--sequence", type=int, default=2048 if on_gpu else 128)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=32000 if on_gpu else 4096)
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps of a attempt, after two (default: 3)"
    )
    parser.add_argument("--most-layers", type=int, default=256 if on_gpu else 96)
    parser.add_argument(
        "--memory-gib",
        type=float,
        default=0 if on_gpu else 2.0,
        help="limit of anonymous memory of a attempt; 0: none",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="for Plait's files on CPUs (default: the temporary folder)",
    )
    parser.add_argument(
        "--seconds", type=float, default=900, help="a attempt may take (default: 900)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny, to see that everything runs; writes nothing"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.hidden, options.sequence, options.vocabulary, options.most_layers, options.steps = (
            64,
            32,
            256,
            2,
            1,
        )
    return options


def _try(name: str, layers: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """What a attempt found; None where memory ran out."""
    heads = max(1, options.hidden // 128)
    model = {
        "model_type": "llama",
        "hidden_size": options.hidden,
        "intermediate_size": options.hidden * 7 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": options.vocabulary,
        "use_cache": False,
    }
    folder = str(options.folder) if options.folder else ""
    limit = int(options.memory_gib * GIB)
    attempt = Attempt(
        name, model, options.micro_batch, options.sequence, options.steps, limit, folder
    )
    content = json.dumps(asdict(attempt) | {"folder": attempt.folder or None})
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.largest_model.worker", content],
            capture_output=True,
            text=True,
            timeout=options.seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{layers} layers took more than {options.seconds:.0f} s") from None
    if ended.returncode == OUT_OF_MEMORY:
        return None
    if ended.returncode:
        raise Failed(
            f"{layers} layers: exit code {ended.returncode}: {' | '.join(ended.stderr.strip().splitlines()[-3:])}"
        )
    answer: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return answer


def _row(name: str, one: dict[str, Any], options: argparse.Namespace) -> tuple[str, ...]:
    tokens = options.micro_batch * options.sequence
    at_common = one["at_common"]
    return (
        TITLES[name],
        str(one["layers"]),
        f"{one['parameters'] / 1e6:,.0f} M",
        f"{tokens / one['seconds']:,.1f}",
        _share(one, tokens),
        f"{tokens / at_common['seconds']:,.1f}" if at_common else "",
        f"{one['peak_bytes'] / GIB:.1f}" if one["peak_bytes"] else "",
    )


def _share(one: dict[str, Any], tokens: int) -> str:
    """6 FLOPs a parameter and token over the device's peak in bfloat16; what is recomputed does not count."""
    if not torch.cuda.is_available():
        return ""
    try:
        peak = float(device_of(torch.cuda.get_device_name()).flops["bf16"])
    except (InputError, KeyError):
        return "?"
    return f"{6 * one['parameters'] * tokens / one['seconds'] / peak:.0%}"


if __name__ == "__main__":
    sys.exit(main())
