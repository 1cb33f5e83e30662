"""Run every technique on the torch of this environment, and compare its losses with one process.

    python -m tools.version_cover                 run the techniques on this torch
    python -m tools.version_cover --suite A.xml   add the numbers of tests in pytest's result files
    python -m tools.version_cover --page          write docs/development/versions.md

The results are benchmarks/results/versions/torch-VERSION.json.
tools/versions.sh makes the environments and calls this. A case trains two steps, saves a checkpoint
and trains a third step from it. The losses are compared in float64, or to three digits where a
technique rounds.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import plait
from benchmarks.common.report import RESULTS, ROOT, markdown, read, revision, today, with_sections
from plait.parallel.schedules.schedule import SCHEDULES
from tests.parity import cases
from tests.pool import Pool, WorkerFailed
from tools import junit

FOLDER = RESULTS / "versions"
PAGE = ROOT / "docs" / "development" / "versions.md"
SECONDS = 300
"""A case that takes longer counts as failed."""
MICRO_BATCHES = 4
"""Micro-batches per step over all data-parallel ranks."""
Config = dict[str, Any]


def _zero(stage: int, **settings: Any) -> Config:
    return {"zero_optimization": {"stage": stage, **settings}}


def _parallel(**settings: Any) -> Config:
    return {"parallel": settings}


def _files(**settings: Any) -> Config:
    return {"device": "nvme", "nvme_path": "{folder}", **settings}


CASES: dict[str, tuple[int, Config]] = {
    "zero-0": (2, {}),
    "zero-0, torch's collectives": (2, _parallel(transport="torch")),
    "zero-1": (2, _zero(1)),
    "zero-2": (2, _zero(2)),
    "zero-3": (2, _zero(3)),
    "zero-3, torch's collectives": (2, _zero(3) | _parallel(transport="torch")),
    "zero-3, hybrid": (4, _zero(3) | _parallel(dp_replicate=2, dp_shard=2)),
    "tensor": (2, _parallel(tp=2)),
    "tensor, sequence": (2, _parallel(tp=2, sequence_parallel=True)),
    "tensor, overlapped": (2, _parallel(tp=2, tensor_overlap=2)),
    "tensor x zero-3": (4, _zero(3) | _parallel(tp=2)),
    **{
        f"pipeline, {name}": (2, _parallel(pp=2, pipeline={"schedule": name})) for name in SCHEDULES
    },
    "pipeline x zero-2": (4, _zero(2) | _parallel(pp=2)),
    "recompute, full": (2, _zero(3) | _parallel(recompute={"mode": "full"})),
    "recompute, selective": (2, _parallel(recompute={"mode": "selective"})),
    "activations on disk": (
        2,
        _parallel(activation_offload={"fraction": 1, "device": "disk", "path": "{folder}"}),
    ),
    "optimizer on disk": (2, _zero(2, offload_optimizer=_files())),
    "parameters on disk": (2, _zero(3, offload_param=_files())),
    "optimizer in the backward": (
        4,
        _zero(2)
        | _parallel(optimizer_in_backward=True, unused_parameters=False)
        | {"gradient_clipping": 0},
    ),
    "loss in chunks": (2, _parallel(loss_chunk_tokens=8)),
    "zero-2, after a step that failed": (2, _zero(2)),
    "zero-2, unused parameters": (2, _zero(2)),
    "compile": (2, {"compile": {"enabled": True, "backend": "aot_eager"}}),
    "checkpoint of zero-3, then tensor": (2, _zero(3) | {"then": _parallel(tp=2)}),
    "checkpoint of a pipeline, then zero-2": (2, _parallel(pp=2) | {"then": _zero(2)}),
    "bf16": (2, _zero(2) | {"bf16": {"enabled": True}}),
    "fp16": (2, _zero(2) | {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "gradients in int8": (2, _parallel(compress_gradients="int8")),
    "gradients by PowerSGD": (2, _parallel(compress_gradients="powersgd")),
    "gradients and weights in int8": (
        2,
        _zero(3) | _parallel(compress_gradients="int8", compress_weights="int8"),
    ),
    "states in int8": (2, _zero(2) | {"optimizer": {**cases.OPTIMIZER, "states": "int8"}}),
}
"""Processes and configuration by name. "then" is the configuration that loads the checkpoint."""
NAMES = "private names (tests/unit/test_torch_names.py)"
LOSSY = ("bf16", "fp16", "gradients", "states")
"""Beginnings of the names of techniques that round."""


def losses(rank: int, world: int, name: str, config: Config, folder: str) -> list[float]:
    """Train two steps, save a checkpoint, and train the third step from it. Runs in a worker."""
    dtype = torch.float32 if name.startswith(LOSSY) else torch.float64
    steps = cases.ragged_steps(MICRO_BATCHES, steps=3, keys=())
    if "unused" in name:  # only the last micro-batch uses a branch, so the first rank never does
        for step in steps:
            for index, micro_batch in enumerate(step):
                micro_batch["side"] = index == MICRO_BATCHES - 1

    def build(config: Config) -> plait.Engine:
        if "unused" in name:
            model = cases.build("plain", tied=True)
        else:
            model = cases.build("llama", tied=True, dtype=dtype, layers=4)
        settings = _settings(world, config, folder)
        return plait.initialize(model, settings, loss_fn=plait.causal_lm_loss)

    def train(engine: plait.Engine, step: list[dict[str, torch.Tensor]]) -> float:
        count = MICRO_BATCHES // engine.dp_size
        start = engine.dp_rank * count
        return float(engine.train_batch(step[start : start + count]).loss)

    first = {**config}
    second = first.pop("then", first)
    engine = build(first)
    values = [train(engine, steps[0])]
    if "failed" in name:
        # Tokens that the embedding does not have, on all ranks.
        wrong = []
        for micro_batch in steps[2]:
            wrong.append({**micro_batch, "input_ids": micro_batch["input_ids"] + cases.VOCABULARY})
        with suppress(IndexError):
            train(engine, wrong)
    values.append(train(engine, steps[1]))
    engine.save_checkpoint(f"{folder}/{world}")
    engine.close()
    again = build(second)
    again.load_checkpoint(f"{folder}/{world}")
    values.append(train(again, steps[2]))
    again.close()
    return values


def _settings(world: int, config: Config, folder: str) -> Config:
    parallel = {"measure_seconds": 0, **config.get("parallel", {})}
    data_ranks = world // parallel.get("tp", 1) // parallel.get("pp", 1)
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES // data_ranks,
        "optimizer": cases.OPTIMIZER,
        "run": {"seed": 3},
    }
    text = json.dumps(base | config | {"parallel": parallel})
    return dict(json.loads(text.replace("{folder}", folder)))


def run_case(pool: Pool, name: str) -> str:
    world, config = CASES[name]
    # The reference has the model and the dtype of the case, no technique, and no failing step.
    reference = "zero-0" if "failed" in name else name
    clipping = {}
    if "gradient_clipping" in config:
        clipping["gradient_clipping"] = config["gradient_clipping"]
    try:
        with tempfile.TemporaryDirectory(prefix="plait-cover-") as folder:
            expected = pool.run(1, losses, reference, clipping, folder, timeout=SECONDS)[0]
            values = pool.run(world, losses, name, config, folder, timeout=SECONDS)[0]
    except WorkerFailed as failure:
        print(failure, file=sys.stderr, flush=True)
        return str(failure).strip().splitlines()[-1][:300]
    worst = max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))
    tolerance = 3e-2 if name.startswith(LOSSY) else 1e-10
    if worst > tolerance:
        return f"losses differ by {worst:.1e}"
    return "passed"


def cover() -> int:
    """Run all cases on this torch, and return 1 if one failed."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "tests/unit/test_torch_names.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = "passed" if done.returncode == 0 else done.stdout.strip().splitlines()[-1]
    outcomes = {NAMES: names}
    pool = Pool()
    try:
        for name in CASES:
            outcomes[name] = run_case(pool, name)
            print(f"torch {torch.__version__}  {name}: {outcomes[name]}", flush=True)
    finally:
        pool.close()
    seconds = round(time.monotonic() - began)
    _record({"plait": revision(), "cases": outcomes, "seconds": seconds})
    return int(any(outcome != "passed" for outcome in outcomes.values()))


def add_suite(files: list[str]) -> int:
    """Record how many tests of each folder passed, failed and were skipped. 1 if one failed."""
    folders: dict[str, list[junit.Result]] = defaultdict(list)
    # A test that ran again counts as in the last file.
    last = {result.test: result for result in junit.results(map(Path, files))}
    for result in last.values():
        folders["/".join(result.test.split("/")[:2])].append(result)
    counts = {folder: junit.counts(results) for folder, results in folders.items()}
    _record({"suite": counts, "suite_plait": revision()})
    return int(any(row["failed"] for row in counts.values()))


def _record(content: dict[str, Any]) -> None:
    path = FOLDER / f"torch-{torch.__version__.partition('+')[0]}.json"
    environment = {"date": today(), "torch": torch.__version__, "python": platform.python_version()}
    path.write_text(json.dumps(read(path, {}) | content | environment, indent=1) + "\n")


def page() -> str:
    runs = [*map(read, sorted(FOLDER.glob("torch-*.json")))]
    reasons: dict[str, int] = {}
    rows = []
    for name in (NAMES, *CASES):
        cells = []
        for run in runs:
            outcome = run["cases"].get(name, "not run")
            if outcome not in ("passed", "not run"):
                outcome = f"**failed** ({reasons.setdefault(outcome, len(reasons) + 1)})"
            cells.append(outcome)
        rows.append((name, *cells))
    notes = "".join(f"\n{number}. {reason}\n" for reason, number in reasons.items())
    suites = []
    lines = ""
    for run in runs:
        for folder, counts in sorted(run.get("suite", {}).items()):
            numbers = map(str, counts.values())
            suites.append((run["torch"], f"`{folder}`", *numbers, run["suite_plait"]))
        lines += f"- torch {run['torch']}, Python {run['python']}, revision {run['plait']}, "
        lines += f"{run['date']}: {run['seconds']} s\n"
    header = ("torch", "tests", "passed", "failed", "skipped", "revision")
    sections = {
        "techniques": markdown(("", *(run["torch"] for run in runs)), rows) + notes,
        "tests": markdown(header, suites),
        "runs": lines,
    }
    return with_sections(PAGE, sections)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--suite"]:
        return add_suite(arguments[1:])
    if arguments == ["--page"]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    return cover()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
