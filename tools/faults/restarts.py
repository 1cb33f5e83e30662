"""Runs of `plait train` that are killed and start again by themselves, end by a signal, or go back from numbers that are not finite."""

from __future__ import annotations

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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plait.checkpoint.folder import find_checkpoint
from plait.cluster.topology import WATCH_FOLDER
from plait.comm import hang, stacks
from tools.faults.forks import Ranks
from tools.faults.runs import ROOT

STEPS, EVERY = 160, 10
STANDBY_STEPS = 1200
"""Where processes stand by, which takes them a while after every start."""
MARK = "PLAIT_FAULTS"
"""A variable that the processes of a command have."""
GRACE_SECONDS = 30.0
LONGEST_SECONDS = 300.0


@dataclass
class Restart:
    """A run, and what it should have been."""

    what: str
    exit_code: int | None = None
    kills: int = 0
    standby: bool = False
    """Whether processes stood by."""
    next_step_seconds: list[float] = field(default_factory=list)
    """From each SIGKILL to the end of the next step."""
    ended_seconds: float | None = None
    """From the signal to the end of the last process."""
    same_losses: bool | None = None
    """Bitwise those of a run that was not disturbed."""
    same_state: bool | None = None
    wrong: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def configuration(folder: Path) -> dict[str, Any]:
    """A tiny Llama with dropout, on two processes."""
    model = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "model": {
            "config": {
                **model,
                "num_key_value_heads": 2,
                "max_position_embeddings": 32,
                "attention_dropout": 0.1,
            }
        },
        "data": {
            "source": "files",
            "paths": [f"{Path(email.__file__).parent}/*.py"],
            "vocab_size": 300,
            "sequence_length": 24,
        },
        "faults": {"timeout_seconds": 30},
        "run": {
            "steps": STEPS,
            "checkpoint_every": EVERY,
            "keep": 2,
            "processes": 2,
            "validate_sequences": 4,
            "folder": str(folder / "run"),
        },
    }


class Train:
    """One `plait train`, which is watched by its metrics."""

    def __init__(self, folder: Path, *options: str, **changed: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = configuration(folder)
        content["run"] |= changed
        (folder / "run.json").write_text(json.dumps(content))
        self.metrics = folder / "run" / "metrics.jsonl"
        self.folder = folder
        environment = {
            **os.environ,
            MARK: str(folder),
            "PLAIT_CACHE": str(folder.parent / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}",
        }
        self.log = folder / "log"
        command = [sys.executable, "-m", "plait", "train", str(folder / "run.json"), *options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True
            )

    def steps(self) -> list[int]:
        """Done until now, as the file has them."""
        return [step for step, _ in losses(self.metrics)]

    def ranks(self) -> dict[int, int]:
        """Rank to process, of those that train."""
        found = {}
        for process, variables in self.processes().items():
            folder = variables.get(WATCH_FOLDER)
            reading = hang.read_board(Path(folder, f"{process}.board")) if folder else None
            if reading is not None and stacks.state(process) not in stacks.ENDED:
                found[reading.rank] = process
        return found

    def processes(self) -> dict[int, dict[str, str]]:
        """All that the command has started and that have not ended, with the environment that they were started with."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, UnicodeDecodeError):
                pairs = (
                    one.partition("=") for one in path.joinpath("environ").read_text().split("\0")
                )
                variables = {name: value for name, _, value in pairs}
                if variables.get(MARK) == str(self.folder):
                    found[int(path.name)] = variables
        return found

    def start(self) -> int:
        """Which start is going on: each begins a new file of metrics. 0 before the first."""
        try:
            return self.metrics.stat().st_ino
        except FileNotFoundError:
            return 0

    def wait_for_steps(self, *, after: int = 0, steps: int = 1) -> bool:
        """Until a start that is not `after` has done `steps`; False where the run has ended."""
        ends = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < ends:
            if self.start() not in (0, after):
                events = [row["event"] for row in rows_of(self.metrics)]
                if "start" in events and events[::-1].index("start") >= steps:
                    return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.01)
        return False

    def wait_for_standby(self, times: int) -> bool:
        """Until processes stand by for the `times`-th time; False where the run has ended."""
        while self.process.poll() is None:
            if self.log.read_text(errors="replace").count("standing by") >= times:
                return True
            time.sleep(0.05)
        return False

    def end(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(LONGEST_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


def rows_of(metrics: Path) -> list[dict[str, Any]]:
    """Whole lines."""
    found = []
    with suppress(FileNotFoundError):
        for line in metrics.read_text().splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def losses(metrics: Path) -> list[tuple[int, float]]:
    """(step, loss), in order."""
    return [(row["step"], row["loss"]) for row in rows_of(metrics) if row["event"] == "step"]


def state(folder: Path) -> tuple[str, str, str] | None:
    """(tag, hash of model and optimizer, hash of the ranks' own) of the last checkpoint."""
    found = find_checkpoint(folder / "run" / "checkpoints")
    return (
        (found.manifest.tag, found.manifest.content, found.manifest.own_content)
        if found is not None
        else None
    )


def undisturbed(folder: Path, *, steps: int = STEPS) -> Path:
    """The folder of a run that nothing happens to."""
    train = Train(folder / f"undisturbed-{steps}", steps=steps)
    if train.end():
        raise SystemExit(
            f"the run that nothing happens to failed:\n{train.log.read_text()[-3000:]}"
        )
    return train.folder


def killed(
    folder: Path, reference: Path, *, kills: int, seed: int, standby: bool = False
) -> Restart:
    """SIGKILL of a rank at a random time, `kills` times; the launcher starts the ranks again. `standby`: after processes stand by."""
    options = ["--max-restarts", str(kills), *(["--standby"] if standby else [])]
    found = Restart(
        f"plait train {' '.join(options)}, a rank killed {kills} times", standby=standby
    )
    chance = random.Random(seed)
    train = Train(
        folder / f"killed-{seed}{'-standby' if standby else ''}",
        *options,
        steps=STANDBY_STEPS if standby else STEPS,
    )
    for kill in range(kills):
        if not train.wait_for_steps() or (standby and not train.wait_for_standby(kill + 1)):
            break
        time.sleep(chance.uniform(0, 0.3))
        victims = train.ranks()
        if not victims:
            break
        at, before = time.monotonic(), train.start()
        os.kill(victims[chance.choice(sorted(victims))], signal.SIGKILL)
        if not train.wait_for_steps(after=before):
            break
        found.kills += 1
        found.next_step_seconds.append(round(time.monotonic() - at, 2))
    found.exit_code = train.end()
    _compare(found, train.folder, reference)
    checks = {
        f"exit code {found.exit_code}": found.exit_code == 0,
        f"only {found.kills} kills": found.kills == kills,
    }
    if standby:
        checks["a restart took more than 3 s"] = max(found.next_step_seconds, default=0) <= 3
    _check(found, checks, train)
    return found


def signalled(
    folder: Path,
    reference: Path,
    number: signal.Signals,
    *,
    one_rank: bool = False,
    restarts: int = 0,
) -> Restart:
    """A signal to the launcher, or to one rank; then the same command again, to the end."""
    who = "one rank" if one_rank else "the launcher"
    found = Restart(
        f"{number.name} to {who}" + (f", --max-restarts {restarts}" if restarts else "")
    )
    name = re.sub(r"\W+", "-", found.what)
    train = Train(folder / name, *(["--max-restarts", str(restarts)] if restarts else []))
    train.wait_for_steps(steps=3)
    ranks = train.ranks()
    os.kill(ranks[1] if one_rank and ranks else train.process.pid, number)
    at = time.monotonic()
    found.exit_code = train.end()
    found.ended_seconds = round(time.monotonic() - at, 2)
    step, last = max(train.steps(), default=0), state(train.folder)
    told = train.log.read_text()
    again = Train(train.folder)
    code = again.end()
    _compare(found, train.folder, reference)
    _check(
        found,
        {
            f"exit code {found.exit_code}, not {128 + number}": found.exit_code == 128 + number,
            f"ended after {found.ended_seconds} s, allowed are {GRACE_SECONDS:g} s": found.ended_seconds
            <= GRACE_SECONDS,
            f"its last step is {step}, and its checkpoint {last}": last is not None
            and last[0] == f"step-{step:08d}",
            "it was done before the signal": 0 < step < STEPS,
            "it told of a failure": "failed" not in told
            and "Traceback" not in told
            and "recorded no exception" not in told,
            f"the same command again ended with {code}": code == 0,
        },
        train,
    )
    return found


def _compare(found: Restart, folder: Path, reference: Path) -> None:
    found.same_losses = losses(folder / "run" / "metrics.jsonl") == losses(
        reference / "run" / "metrics.jsonl"
    )
    found.same_state = state(folder) == state(reference)


def _check(found: Restart, checks: dict[str, bool], train: Train) -> None:
    checks |= {
        "other losses": found.same_losses is not False,
        "another state at the end": found.same_state is not False,
    }
    found.wrong += [what for what, right in checks.items() if not right]
    left = list(train.processes())
    if left:
        found.wrong.append(f"processes left: {left}")
    if found.wrong:
        found.wrong.append(train.log.read_text()[-1500:])
    else:
        shutil.rmtree(train.folder)


def roll_back(folder: Path, *, rank_of_it: int) -> Restart:
    """A batch whose loss is NaN on one rank: the run goes back to its last checkpoint, leaves the batch out, and goes on to its end. It is
    the run that never had the batch, bit for bit."""
    found = Restart(f"NaN in the loss of rank {rank_of_it}, run.roll_backs = 1")
    bad = 24 * 4  # sequences consumed before step 25
    codes = {}
    for name in ("rolled", "without"):
        at = folder / f"{name}-{rank_of_it}"
        at.mkdir(parents=True)
        content = configuration(at)
        content["run"] |= {"roll_backs": 1, "steps": 40}
        (at / "run.json").write_text(json.dumps(content))
        ranks = Ranks(
            _trained,
            2,
            str(at / "run.json"),
            bad,
            rank_of_it,
            name == "without",
            log=at / "log",
            environment={"PLAIT_CACHE": str(folder / "cache")},
        )
        codes[name] = dict(ranks.wait(LONGEST_SECONDS))
    rolled, without = folder / f"rolled-{rank_of_it}", folder / f"without-{rank_of_it}"
    found.exit_code = max(codes["rolled"].values(), key=abs)
    found.same_losses = losses(rolled / "run" / "metrics.jsonl") == losses(
        without / "run" / "metrics.jsonl"
    )
    found.same_state = state(rolled) == state(without) and state(rolled) is not None
    starts = [row for row in rows_of(rolled / "run" / "metrics.jsonl") if row["event"] == "start"]
    told = " ".join(note for row in starts for note in row["resumed"])
    checks = {
        f"exit codes {codes}": not any(code for of in codes.values() for code in of.values()),
        f"it told {told!r}": f"the loss of rank {rank_of_it} is not finite" in told
        and "went back to step 20" in told,
        "other losses than without the batch": found.same_losses,
        "another state than without the batch": found.same_state,
    }
    found.wrong += [what for what, right in checks.items() if not right]
    if found.wrong:
        found.wrong.append((rolled / "log").read_text()[-1500:])
    return found


def _trained(rank: int, file: str, bad: int, rank_of_it: int, leave_out: bool) -> None:
    """One rank of `plait train`, whose batch after `bad` sequences has a loss that is not finite on one rank; or that leaves it out."""
    from unittest.mock import patch

    import torch

    from plait.cli.main import main
    from plait.data.loader import Loader
    from plait.train import session

    honest, at = Loader.at, [-1]

    def reading(loader: Any, samples: int) -> Any:
        at[0] = samples
        return honest(loader, samples)

    kind = type(session.causal_lm_loss)
    computed, job = kind.__call__, session._training_context

    def planted(loss: Any, output: Any, batch: Any) -> Any:
        total, weight = computed(loss, output, batch)
        nan = at[0] == bad and rank == rank_of_it and torch.is_grad_enabled() and not leave_out
        return (total * float("nan") if nan else total), weight

    def without(*args: Any) -> Any:
        args[-1].update({bad} if leave_out else ())
        return job(*args)

    with (
        patch.object(Loader, "at", reading),
        patch.object(kind, "__call__", planted),
        patch.object(session, "_training_context", without),
    ):
        main(["train", file])
