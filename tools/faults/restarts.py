"""Runs of `plait train` that restart after kills, end by a signal, or roll back from NaN."""

import email
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from plait.checkpoint.folder import find_checkpoint
from plait.cluster.topology import WATCH_FOLDER
from plait.comm import hang, stacks
from tools.faults.forks import Ranks, broken
from tools.mutants.project import environment

Row = dict[str, Any]
STEPS, EVERY = 160, 10
STANDBY_STEPS = 1200
"""Length of runs with processes that stand by, which takes them a while after each start."""
MARK = "PLAIT_FAULTS"
"""Environment variable by which the processes of a command are found."""
GRACE_SECONDS = 30.0
LIMIT_SECONDS = 300.0
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.1,
}


def all_restarts(size: str, folder: Path) -> Iterator[Row]:
    """Run all cases of a size, and compare each with a run that nothing happens to."""
    repeat, kills = {"small": (1, 2), "nightly": (2, 4), "release": (10, 10)}[size]
    for rank in range(2):
        yield roll_back(folder, rank)
    reference = undisturbed(folder, STEPS)
    for seed in range(repeat):
        yield killed(folder, reference, kills=kills, seed=seed)
    signals = [signal.SIGTERM]
    if size != "small":
        longer = undisturbed(folder, STANDBY_STEPS)
        yield killed(folder, longer, kills=kills, seed=0, steps=STANDBY_STEPS)
        signals += [signal.SIGUSR1, signal.SIGINT]
    for number in signals:
        yield signalled(folder, reference, number)
    restarts = ("--max-restarts", "2")
    yield signalled(folder, reference, signal.SIGUSR1, *restarts, one_rank=True)


def write_configuration(folder: Path, **run: Any) -> Path:
    """Write the file of a tiny Llama with dropout on two processes."""
    data = {"source": "files", "vocab_size": 300, "sequence_length": 24}
    usual = {"steps": STEPS, "checkpoint_every": EVERY, "keep": 2, "processes": 2}
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "model": {"config": MODEL},
        "data": {**data, "paths": [f"{Path(email.__file__).parent}/*.py"]},
        "faults": {"timeout_seconds": 30},
        "run": {**usual, "validate_sequences": 4, "folder": str(folder / "run"), **run},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.json"
    file.write_text(json.dumps(config))
    return file


class Train:
    """A running `plait train`, which is watched by its metrics."""

    def __init__(self, folder: Path, *options: str, **run: Any) -> None:
        file = write_configuration(folder, **run)
        self.folder = folder
        self.log = folder / "log"
        variables = {MARK: str(folder), "PLAIT_CACHE": str(folder.parent / "cache")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "plait", "train", str(file), *options],
                stdout=log,
                stderr=log,
                env=environment(**variables),
                cwd=folder,
                start_new_session=True,
            )

    def ranks(self) -> dict[int, int]:
        """Return the processes that train, by rank."""
        ranks = {}
        for process, variables in self.processes().items():
            folder = variables.get(WATCH_FOLDER, "")
            reading = hang.read_board(Path(folder, f"{process}.board"))
            if reading is not None and stacks.state(process) not in stacks.ENDED:
                ranks[reading.rank] = process
        return ranks

    def processes(self) -> dict[int, dict[str, str]]:
        """Return the environments of all processes that the command started and that run."""
        processes = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, UnicodeDecodeError):
                lines = path.joinpath("environ").read_text().split("\0")
                variables = dict(line.split("=", 1) for line in lines if "=" in line)
                if variables.get(MARK) == str(self.folder):
                    processes[int(path.name)] = variables
        return processes

    def start(self) -> int:
        """Return a number of the current start, which has metrics of its own, or 0."""
        try:
            return metrics_file(self.folder).stat().st_ino
        except FileNotFoundError:
            return 0

    def wait_for_steps(self, *, after: int = 0, steps: int = 1) -> bool:
        """Wait until a start other than `after` has done some steps. False if the run ends."""

        def has_steps() -> bool:
            events = [row["event"] for row in metrics(self.folder)]
            is_started = self.start() not in (0, after) and "start" in events
            return is_started and events[::-1].index("start") >= steps

        return self._wait_for(has_steps)

    def wait_for_standby(self, times: int) -> bool:
        """Wait until processes stand by for the `times`-th time. False if the run ends."""
        text = "standing by"
        return self._wait_for(lambda: self.log.read_text(errors="replace").count(text) >= times)

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            if condition():
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.01)
        return False

    def end(self) -> int:
        try:
            return self.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


def metrics_file(folder: Path) -> Path:
    return folder / "run" / "metrics.jsonl"


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines of the metrics of a run."""
    rows = []
    with suppress(FileNotFoundError):
        for line in metrics_file(folder).read_text().splitlines():
            with suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in metrics(folder) if row["event"] == "step"]


def state(folder: Path) -> tuple[str, str, str] | None:
    """Return tag and hashes of the newest checkpoint of a run."""
    checkpoint = find_checkpoint(folder / "run" / "checkpoints")
    if checkpoint is None:
        return None
    manifest = checkpoint.manifest
    return manifest.tag, manifest.content, manifest.own_content


def undisturbed(folder: Path, steps: int) -> Path:
    train = Train(folder / f"undisturbed-{steps}", steps=steps)
    if train.end():
        raise SystemExit(f"the undisturbed run failed:\n{train.log.read_text()[-3000:]}")
    return train.folder


def killed(folder: Path, reference: Path, *, kills: int, seed: int, steps: int = STEPS) -> Row:
    """Kill a rank at random times. In runs of STANDBY_STEPS, after processes stand by."""
    options = ["--max-restarts", str(kills)]
    standby = steps == STANDBY_STEPS
    if standby:
        options.append("--standby")
    seconds: list[float] = []
    chance = random.Random(seed)
    train = Train(folder / f"killed-{seed}-{steps}", *options, steps=steps)
    for kill in range(kills):
        if not train.wait_for_steps() or (standby and not train.wait_for_standby(kill + 1)):
            break
        time.sleep(chance.uniform(0, 0.3))
        victims = train.ranks()
        if not victims:
            break
        began = time.monotonic()
        before = train.start()
        os.kill(victims[chance.choice(sorted(victims))], signal.SIGKILL)
        if not train.wait_for_steps(after=before):
            break
        seconds.append(round(time.monotonic() - began, 2))
    code = train.end()
    promises = {
        f"exit code {code}": code == 0,
        f"only {len(seconds)} kills": len(seconds) == kills,
        "a restart took more than 3 s": not standby or max(seconds, default=0) <= 3,
    }
    what = f"plait train {' '.join(options)}, a rank killed {kills} times"
    row = _judged(what, code, promises, train.folder, reference, train.processes())
    return row | {"next_step_seconds": seconds}


def signalled(
    folder: Path, reference: Path, number: signal.Signals, *options: str, one_rank: bool = False
) -> Row:
    """Send a signal to the launcher or to one rank, and run the same command again."""
    target = "one rank" if one_rank else "the launcher"
    what = ", ".join(filter(None, [f"{number.name} to {target}", " ".join(options)]))
    train = Train(folder / re.sub(r"\W+", "-", what), *options)
    train.wait_for_steps(steps=3)
    ranks = train.ranks()
    process = train.process.pid
    if one_rank and ranks:
        process = ranks[1]
    os.kill(process, number)
    began = time.monotonic()
    code = train.end()
    seconds = round(time.monotonic() - began, 2)
    step, _ = max(losses(train.folder), default=(0, 0.0))
    last = state(train.folder)
    log = train.log.read_text()
    failures = [word for word in ("failed", "Traceback", "no exception") if word in log]
    again = Train(train.folder).end()
    promises = {
        f"exit code {code}, not {128 + number}": code == 128 + number,
        f"ended after {seconds} s, allowed are {GRACE_SECONDS:g} s": seconds <= GRACE_SECONDS,
        f"its last step is {step}, and its checkpoint {last}": last is not None
        and last[0] == f"step-{step:08d}",
        "it was done before the signal": 0 < step < STEPS,
        f"it reported {failures}": not failures,
        f"the same command again ended with {again}": again == 0,
    }
    row = _judged(what, code, promises, train.folder, reference, train.processes())
    return row | {"ended_seconds": seconds}


def _judged(
    what: str,
    code: int,
    promises: dict[str, bool],
    folder: Path,
    reference: Path,
    left: Collection[int] = (),
) -> Row:
    """Return the row of a run that must end like the reference."""
    same_losses = losses(folder) == losses(reference)
    same_state = state(folder) == state(reference) and state(folder) is not None
    promises |= {"other losses": same_losses, "another state at the end": same_state}
    promises[f"processes left: {[*left]}"] = not left
    wrong = broken(promises)
    if wrong:
        wrong.append((folder / "log").read_text()[-1500:])
    else:
        shutil.rmtree(folder)
    row = {"what": what, "exit_code": code, "next_step_seconds": [], "ended_seconds": None}
    return row | {"same_losses": same_losses, "same_state": same_state, "wrong": wrong}


def roll_back(folder: Path, nan_rank: int) -> Row:
    """Let the loss of a batch be NaN on one rank, and compare with a run without that batch."""
    samples = 24 * 4  # before step 25
    codes = []
    folders = (folder / f"rolled-{nan_rank}", folder / f"without-{nan_rank}")
    for place in folders:
        file = write_configuration(place, roll_backs=1, steps=40)
        arguments = (str(file), samples, nan_rank, place is folders[1])
        variables = {"PLAIT_CACHE": str(folder / "cache")}
        ranks = Ranks(_train_with_nan, 2, *arguments, log=place / "log", environment=variables)
        codes += ranks.wait(LIMIT_SECONDS)
    resumed = []
    for row in metrics(folders[0]):
        if row["event"] == "start":
            resumed += row["resumed"]
    notes = " ".join(resumed)
    cause = f"the loss of rank {nan_rank} is not finite"
    promises = {
        f"exit codes {codes}": not any(codes),
        f"it reported {notes!r}": cause in notes and "went back to step 20" in notes,
    }
    what = f"NaN in the loss of rank {nan_rank}, run.roll_backs = 1"
    return _judged(what, max(codes[:2], key=abs), promises, *folders)


def _train_with_nan(rank: int, file: str, samples: int, nan_rank: int, leave_out: bool) -> None:
    """Run one rank of `plait train`, with NaN in the batch after `samples` or without the batch."""
    import torch

    from plait.cli.main import main
    from plait.data.loader import Loader
    from plait.train import session

    read = Loader.at
    loss_type = type(session.causal_lm_loss)
    compute = loss_type.__call__
    training_context = session._training_context
    position = [-1]

    def at(loader: Any, start: int) -> Any:
        position[0] = start
        return read(loader, start)

    def loss(self: Any, output: Any, batch: Any) -> Any:
        total, weight = compute(self, output, batch)
        is_bad = position[0] == samples and rank == nan_rank and torch.is_grad_enabled()
        if is_bad and not leave_out:
            total = total * float("nan")
        return total, weight

    def context(*args: Any) -> Any:
        if leave_out:
            args[-1].add(samples)
        return training_context(*args)

    with (
        patch.object(Loader, "at", at),
        patch.object(loss_type, "__call__", loss),
        patch.object(session, "_training_context", context),
    ):
        main(["train", file])
