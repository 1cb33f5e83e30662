"""Run every technique on the torch of this environment, and compare its losses with one process.

    python tools/version_cover.py                 write benchmarks/results/versions/torch-VERSION.json
    python tools/version_cover.py "zero-3"        run the cases whose name contains the text only
    python tools/version_cover.py --suite A.xml   add the numbers of tests in pytest's result files
    python tools/version_cover.py --page          write docs/development/versions.md from the recorded results

tools/versions.sh makes the environments and calls this. A case trains two steps, saves a checkpoint
and trains a third step from it. The losses are compared in float64, or to three digits where a
technique rounds. A case that does not end within SECONDS counts as failed. The processes of a case
are forks of this one, so that torch is imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import plait
import plait.engine.build  # before the forks
from benchmarks.common.report import markdown, today
from plait.parallel.schedules.schedule import SCHEDULES
from tests.parity import cases

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = (
    ROOT / "benchmarks" / "results" / "versions",
    ROOT / "docs" / "development" / "versions.md",
)

SECONDS = 300
GLOBAL = 4
"""Micro-batches of a step over all data-parallel ranks."""
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    # name: (processes, what the file says; "then" is what the one says that loads the checkpoint, where it is another)
    "zero-0": (2, {}),
    "zero-0, torch's collectives": (2, {"parallel": {"transport": "torch"}}),
    "zero-1": (2, {"zero_optimization": {"stage": 1}}),
    "zero-2": (2, {"zero_optimization": {"stage": 2}}),
    "zero-3": (2, {"zero_optimization": {"stage": 3}}),
    "zero-3, torch's collectives": (
        2,
        {"zero_optimization": {"stage": 3}, "parallel": {"transport": "torch"}},
    ),
    "zero-3, hybrid": (
        4,
        {"zero_optimization": {"stage": 3}, "parallel": {"dp_replicate": 2, "dp_shard": 2}},
    ),
    "tensor": (2, {"parallel": {"tp": 2}}),
    "tensor, sequence": (2, {"parallel": {"tp": 2, "sequence_parallel": True}}),
    "tensor, overlapped": (2, {"parallel": {"tp": 2, "tensor_overlap": 2}}),
    "tensor x zero-3": (4, {"zero_optimization": {"stage": 3}, "parallel": {"tp": 2}}),
    **{
        f"pipeline, {name}": (2, {"parallel": {"pp": 2, "pipeline": {"schedule": name}}})
        for name in SCHEDULES
    },
    "pipeline x zero-2": (4, {"zero_optimization": {"stage": 2}, "parallel": {"pp": 2}}),
    "recompute, full": (
        2,
        {"zero_optimization": {"stage": 3}, "parallel": {"recompute": {"mode": "full"}}},
    ),
    "recompute, selective": (2, {"parallel": {"recompute": {"mode": "selective"}}}),
    "activations on disk": (
        2,
        {"parallel": {"activation_offload": {"fraction": 1, "device": "disk", "path": "{folder}"}}},
    ),
    "optimizer on disk": (
        2,
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "nvme", "nvme_path": "{folder}"},
            }
        },
    ),
    "parameters on disk": (
        2,
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "{folder}"},
            }
        },
    ),
    "optimizer in the backward": (
        4,
        {
            "zero_optimization": {"stage": 2},
            "gradient_clipping": 0,
            "parallel": {"optimizer_in_backward": True, "unused_parameters": False},
        },
    ),
    "loss in chunks": (2, {"parallel": {"loss_chunk_tokens": 8}}),
    "zero-2, after a step that failed": (2, {"zero_optimization": {"stage": 2}}),
    "zero-2, unused parameters": (2, {"zero_optimization": {"stage": 2}}),
    "compile": (2, {"compile": {"enabled": True, "backend": "aot_eager"}}),
    "checkpoint of zero-3, then tensor": (
        2,
        {"zero_optimization": {"stage": 3}, "then": {"parallel": {"tp": 2}}},
    ),
    "checkpoint of a pipeline, then zero-2": (
        2,
        {"parallel": {"pp": 2}, "then": {"zero_optimization": {"stage": 2}}},
    ),
    "bf16": (2, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}),
    "fp16": (
        2,
        {"fp16": {"enabled": True, "initial_scale_power": 8}, "zero_optimization": {"stage": 2}},
    ),
    "gradients in int8": (2, {"parallel": {"compress_gradients": "int8"}}),
    "gradients by PowerSGD": (2, {"parallel": {"compress_gradients": "powersgd"}}),
    "gradients and weights in int8": (
        2,
        {
            "zero_optimization": {"stage": 3},
            "parallel": {"compress_gradients": "int8", "compress_weights": "int8"},
        },
    ),
    "states in int8": (
        2,
        {"zero_optimization": {"stage": 2}, "optimizer": {**cases.OPTIMIZER, "states": "int8"}},
    ),
}
NAMES = "private names (tests/unit/test_torch_names.py)"
LOSSY = ("bf16", "fp16", "gradients", "states")
"""Beginnings of what changes numbers: its losses are compared to three digits."""


def losses(world: int, more: dict[str, Any], folder: str, name: str) -> list[float]:
    """Two steps, a checkpoint before the third, and the third by who has loaded it."""
    dtype = torch.float32 if name.startswith(LOSSY) else torch.float64
    steps = cases.ragged_steps(GLOBAL, steps=3, keys=())
    if "unused" in name:  # only the last micro-batch uses a branch, so the first rank never does
        for step in steps:
            for index, micro_batch in enumerate(step):
                micro_batch["side"] = index == GLOBAL - 1

    def build(more: dict[str, Any]) -> plait.Engine:
        config = settings(world, more, folder)
        if "unused" in name:
            model = cases.build("plain", tied=True)
        else:
            model = cases.build("llama", tied=True, dtype=dtype, layers=4)
        return plait.initialize(model, config, loss_fn=plait.causal_lm_loss)

    def train(engine: plait.Engine, step: list[dict[str, torch.Tensor]]) -> float:
        count = GLOBAL // engine.dp_size
        return float(
            engine.train_batch(step[engine.dp_rank * count : (engine.dp_rank + 1) * count]).loss
        )

    then = {name: value for name, value in more.items() if name != "then"}
    engine = build(then)
    found = [train(engine, step) for step in steps[: 1 if "failed" in name else 2]]
    if "failed" in name:  # in the middle of a forward, on all ranks
        with suppress(IndexError):
            train(
                engine,
                [
                    {**piece, "input_ids": piece["input_ids"] + cases.VOCABULARY}
                    for piece in steps[2]
                ],
            )
        found.append(train(engine, steps[1]))
    engine.save_checkpoint(f"{folder}/{world}")
    again = build(more.get("then", then))
    again.load_checkpoint(f"{folder}/{world}")
    return [*found, train(again, steps[2])]


def settings(world: int, more: dict[str, Any], folder: str) -> dict[str, Any]:
    """A file for `world` processes."""
    parallel = {"measure_seconds": 0, **more.get("parallel", {})}
    dp = world // parallel.get("tp", 1) // parallel.get("pp", 1)
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": GLOBAL // dp,
        "optimizer": cases.OPTIMIZER,
        "run": {"seed": 3},
    }
    return json.loads(json.dumps(base | more | {"parallel": parallel}).replace("{folder}", folder))


def child(
    rank: int, world: int, name: str, more: dict[str, Any], folder: str, results: Any
) -> None:
    """One process of a case."""
    warnings.simplefilter("ignore")
    os.chdir(folder)
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
        )
        results.put((rank, losses(world, more, folder, name)))
    except BaseException:
        results.put((rank, traceback.format_exc(limit=-4)))
    results.close()
    results.join_thread()
    os._exit(0)


def run(name: str, world: int, more: dict[str, Any]) -> list[float] | str:
    """The losses, or what went wrong."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="plait-cover-") as folder:
        results = context.Queue()
        processes = [
            context.Process(target=child, args=(rank, world, name, more, folder, results))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < world:
                rank, value = results.get(timeout=SECONDS)
                found[rank] = value
                if isinstance(value, str):
                    return value
        except Exception as error:
            return f"no answer within {SECONDS} s ({type(error).__name__})"
        finally:
            for process in processes:
                process.join(0 if len(found) < world else 10)
                process.kill()
    return found[0]


@cache
def one_process(name: str, clipping: float | None) -> list[float] | str:
    """Return the losses of one process with the model and the dtype of the case `name`."""
    return run(name, 1, {} if clipping is None else {"gradient_clipping": clipping})


def reference_of(name: str) -> str:
    """Return the case without a technique that has the model and the dtype of the case `name`."""
    if "unused" in name:
        return name
    return "bf16" if name.startswith(LOSSY) else "zero-0"


def outcome(found: list[float] | str, expected: list[float] | str, limit: float) -> str:
    """One line on a case."""
    if isinstance(found, str) or isinstance(expected, str):
        text = found if isinstance(found, str) else str(expected)
        print(text, file=sys.stderr, flush=True)
        return text.strip().splitlines()[-1][:300]
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    return "passed" if worst <= limit else f"losses differ by {worst:.1e}"


def cover(wanted: str) -> int:
    """Run the cases of one torch; 1 where one failed."""
    began = time.monotonic()
    rows: dict[str, str] = {}
    for name, (world, more) in CASES.items():
        if wanted in name:
            lossy = name.startswith(LOSSY)
            expected = one_process(reference_of(name), more.get("gradient_clipping"))
            rows[name] = outcome(run(name, world, more), expected, 3e-2 if lossy else 1e-10)
            print(f"torch {torch.__version__}  {name}: {rows[name]}", flush=True)
    if not wanted:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(ROOT / "tests" / "unit" / "test_torch_names.py"),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        rows = {
            NAMES: "passed" if done.returncode == 0 else done.stdout.strip().splitlines()[-1],
            **rows,
        }
    before = recorded()
    earlier = before if wanted else {**before, "cases": {}, "seconds": 0}
    seconds = round(earlier["seconds"] + time.monotonic() - began)
    record({**earlier, "plait": revision(), "cases": earlier["cases"] | rows, "seconds": seconds})
    return int(any(row != "passed" for row in rows.values()))


def result_file() -> Path:
    """Return the file with the results of this torch."""
    return RESULTS / f"torch-{torch.__version__.partition('+')[0]}.json"


def recorded() -> dict[str, Any]:
    """Return the results of this torch that were recorded before."""
    if result_file().exists():
        return json.loads(result_file().read_text())
    return {"cases": {}, "seconds": 0}


def record(content: dict[str, Any]) -> None:
    """Write results of this torch, with the versions of torch and Python."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    environment = {"date": today(), "torch": torch.__version__, "python": platform.python_version()}
    result_file().write_text(json.dumps(content | environment, indent=1) + "\n")


def add_suite(files: list[str]) -> int:
    """Record how many tests of each folder passed, failed and were skipped.

    Args:
        files: Result files of `pytest --junitxml`. Together they cover the complete suite. A test that was
            run again counts as in the last file.

    Returns:
        1 if a test failed, else 0.
    """
    results: dict[tuple[str, str], str] = {}
    for file in files:
        for test in ElementTree.parse(file).iter("testcase"):
            kinds = {child.tag for child in test}
            result = "passed"
            if kinds & {"failure", "error"}:
                result = "failed"
            elif "skipped" in kinds:
                result = "skipped"
            results[test.attrib["classname"], test.attrib["name"]] = result

    counts: dict[str, dict[str, int]] = {}
    for (module, _), result in results.items():
        folder = "/".join(module.split(".")[:2])
        row = counts.setdefault(folder, {"passed": 0, "failed": 0, "skipped": 0})
        row[result] += 1
    record({**recorded(), "suite": counts, "suite_plait": revision()})
    return int(any(row["failed"] for row in counts.values()))


def revision() -> str:
    """Of what runs."""
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()


HEAD = """# Versions of torch

Plait runs on torch 2.11 to 2.15. The table shows what was run on each release. In every row a small
Llama trains two steps and saves a checkpoint, and a second engine trains a third step from it. A
row passes if all losses equal those of one process: within 1e-10 in float64, and within 3e-2 for
techniques that round (bf16, fp16, 8-bit numbers, PowerSGD).

```bash
make versions                  # all five releases
make versions ARGS="2.12.1"    # one release
```

The processes run on CPUs with gloo. The table says nothing about speed, about GPUs, or about
techniques that need a GPU, such as offload to host memory. On the oldest and on the newest release
`make versions` also runs the parity tests and the predictions of memory and traffic; the
[second table](#tests-on-the-oldest-and-the-newest-release) has the numbers.

"""
SUITE = """
## Tests on the oldest and the newest release

`tests/parity` compares every technique with one process in float64. `tests/fake` compares predicted
bytes of memory and traffic with what a step uses. Skipped tests need a GPU, a package that is not
installed, or a network.

"""
DIFFERENCES = """
## What differs between releases

Plait asks torch what exists and does not compare version numbers. The code is in `plait/_torch`, and
`tests/unit/test_torch_names.py` runs it on every release.

| torch | difference | what Plait does |
|---|---|---|
| 2.11, 2.12 | `all_gather_single` and `reduce_scatter_single` have other names | calls the names that exist |
| 2.11, 2.12 | process groups written in Python are called by other names | names the methods of its own group accordingly |
| 2.11, 2.12 | `FSDPModule.reset_iter_state` is missing | resets the state of a failed pass itself |
| 2.11, 2.12 | `set_reduce_scatter_unused_params` is missing | adds zeros for unused parameters before a reduction |
| 2.11 | the gradient of an unevenly split parameter is gathered by every rank | keeps the gradient split |
| 2.11 | tensors in dataclasses that a unit returns are not found | opens dataclasses |
| 2.15 | `reset_iter_state` drops gradients of earlier micro-batches | keeps them if the step goes on |
| 2.15 | gradients are packed by dtype for a reduction | compresses them in that order |
"""


def page() -> None:
    """Write docs/development/versions.md."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob("torch-*.json")]
    found.sort(key=release)
    reasons: dict[str, int] = {}
    rows = []
    for name in (NAMES, *CASES):
        cells = [one["cases"].get(name, "not run") for one in found]
        rows.append(
            (
                name,
                *(
                    cell
                    if cell in ("passed", "not run")
                    else f"**failed** ({reasons.setdefault(cell, len(reasons) + 1)})"
                    for cell in cells
                ),
            )
        )
    text = HEAD + markdown(("", *(one["torch"] for one in found)), rows)
    if reasons:
        text += "\n\n" + "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    tested = [one for one in found if "suite" in one]
    if tested:
        text = text.rstrip() + "\n" + SUITE + suite_table(tested)
    lines = [
        f"- torch {one['torch']}, Python {one['python']}, revision {one['plait']}, {one['date']}: {one['seconds']} s"
        for one in found
    ]
    PAGE.write_text(text.rstrip() + "\n" + DIFFERENCES + "\n## Runs\n\n" + "\n".join(lines) + "\n")


def suite_table(tested: list[dict[str, Any]]) -> str:
    """Return the table of test results, one row per release and folder."""
    rows = [
        (
            one["torch"],
            f"`{folder}`",
            *(str(count[key]) for key in ("passed", "failed", "skipped")),
            one["suite_plait"],
        )
        for one in tested
        for folder, count in sorted(one["suite"].items())
    ]
    return markdown(("torch", "tests", "passed", "failed", "skipped", "revision"), rows)


def release(one: dict[str, Any]) -> list[int]:
    """Return the release of a result as numbers, which sort correctly."""
    return [int(number) for number in one["torch"].partition("+")[0].split(".")]


def main(arguments: list[str]) -> int:
    """Do what the module's docstring says."""
    if arguments[:1] == ["--suite"]:
        return add_suite(arguments[1:])
    if arguments == ["--page"]:
        page()
        return 0
    return cover(arguments[0] if arguments else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
