"""Parameters a second of an AdamW step on the host: torch's fused kernel, Plait's step over files, and DeepSpeedCPUAdam where it imports.

Interleaved rounds, one process, one thread; the order turns from round to round. Ratios are taken within a round. After the rounds the
parameters of all baselines are compared. Run: python -m benchmarks.offload [rounds] [--parameters N] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common.report import facts
from benchmarks.common.statistics import paired_ratio, spread
from benchmarks.offload import overlap
from benchmarks.offload.baselines import (
    Step,
    deepspeed_cpu_adam,
    parameters,
    plait_files,
    torch_fused,
)

TENSORS = 16
MEMORY = Path("/dev/shm")


def main() -> None:
    """Print a line for every baseline and write results/offload.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=15)
    parser.add_argument("--parameters", type=int, default=32_000_000)
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="only the overlap of a throttled disk and computation, in memory",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the files are besides memory; left out: a temporary folder",
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.overlap:
        keep({"overlap": overlaps(min(given.rounds, 5)), "overlap_machine": facts("torch")})
        return
    count = given.parameters
    with tempfile.TemporaryDirectory() as temporary:
        modules = {}
        steps: dict[str, Step] = {}

        def enter(name: str, make: object) -> None:
            modules[name] = parameters(count, TENSORS)
            try:
                steps[name] = make(modules[name])  # type: ignore[operator]
            except Exception as error:  # an optional competitor that does not build here
                print(
                    f"{name}: left out ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
                )
                del modules[name]

        enter("torch", torch_fused)
        enter(
            "plait, files in memory",
            lambda module: plait_files(module, MEMORY, buffer_bytes=16 * count // 32),
        )
        enter(
            "plait, files on disk",
            lambda module: plait_files(
                module, given.folder or Path(temporary), buffer_bytes=16 * count // 32
            ),
        )
        enter("deepspeed", deepspeed_cpu_adam)
        seconds = measure(steps, given.rounds)
    results = {}
    for name, taken in seconds.items():
        ratio = paired_ratio(taken, seconds["torch"])
        rate = spread([count / each / 1e6 for each in taken])
        assert ratio is not None
        results[name] = {
            "million_parameters_per_second": rate.as_dict(),
            "time_to_torch": ratio.as_dict(),
        }
        print(
            f"{name:24s} {rate.median:7.1f} M parameters/s ({rate.low:.1f} to {rate.high:.1f}), time / torch's {ratio.median:.3f} "
            f"({ratio.low:.3f} to {ratio.high:.3f})"
        )
    errors = {
        name: largest_difference(modules["torch"], module) for name, module in modules.items()
    }
    print(
        "largest difference of a parameter from torch's:",
        {name: f"{error:.1e}" for name, error in errors.items()},
    )
    keep(
        {
            "machine": facts("torch", "deepspeed"),
            "rounds": given.rounds,
            "parameters": count,
            "results": results,
            "differences": errors,
        }
    )


def overlaps(rounds: int) -> dict[str, dict[str, object]]:
    """Time over the slower of I/O and computation, by phase and by which of the two is the slower."""
    found: dict[str, dict[str, object]] = {}
    for phase in (overlap.optimizer_step, overlap.forward_and_backward):
        for name, ratio in overlap.RATIOS.items():
            taken = phase(MEMORY, ratio, rounds)
            print(
                f"{phase.__name__:20s} {name:14s} time / max(I/O, compute) {min(taken):.3f} to {max(taken):.3f}"
            )
            found.setdefault(phase.__name__, {})[name] = spread(taken).as_dict()
    return found


def keep(part: dict[str, object]) -> None:
    """Write some results beside those that are there."""
    target = Path(__file__).parents[1] / "results" / "offload.json"
    before = json.loads(target.read_text()) if target.exists() else {}
    target.write_text(json.dumps({**before, **part}, indent=1) + "\n")


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step, by baseline; two rounds before are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(-2, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            steps[name]()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def largest_difference(a: torch.nn.ParameterList, b: torch.nn.ParameterList) -> float:
    """Over all parameters."""
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
