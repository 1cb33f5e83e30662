"""Runs whose checkpoints are killed: at every call of a save to the file system and at random times, on each rank, with tags used again.

After every kill, what is there is looked at. A checkpoint that was reported as durable must be there, or a newer one (else it is lost), and
its every byte must be that of the same step of a run that was not killed (else it is mixed). The next attempt goes on from it. At the end
losses and the hashes of the states are bitwise those of the run that was not killed.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.checkpoint.folder import CheckpointFolder, candidates
from plait.checkpoint.load import Reader
from plait.errors import CheckpointError
from tests.faulty_files import Planted, planted
from tools.faults.forks import Notes, Ranks

HIDDEN, WORLD = 32, 2
Plan = tuple[int, int, str]
"""(rank, number of the call, its name); -1 for a random time."""
KEEPS = {
    "last": lambda step: "last",
    "two": lambda step: f"tag-{step % 2}",
    "steps": lambda step: f"step-{step}",
}
"""How a run names its checkpoints: one tag again and again, two in turn, a new one a step (and old ones deleted)."""


@dataclass
class Kills:
    """What became of them."""

    kills: int = 0
    at_calls: int = 0
    """Of them at a named call of a save."""
    names: list[str] = field(default_factory=list)
    """Of those calls."""
    by_rank: dict[int, int] = field(default_factory=dict)
    lost: int = 0
    mixed: int = 0
    resumed: int = 0
    """Attempts that went on from a checkpoint."""
    runs: int = 0
    """That were killed until they ended."""
    other_ends: int = 0
    """Of them with another loss or state than the run that was not killed."""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "names": sorted(
                {
                    _CHANGING.sub(lambda found: f"{found[1]}*" if found[1] else "TAG", one)
                    for one in self.names
                }
            ),
        }


_CHANGING = re.compile(r"(LATEST\.)[0-9a-f]+|(last|tag-\d|step-\d+)(?=\.|$| )")
"""In the names of files."""


def train(rank: int, folder: str, steps: int, keeps: str, kill_rank: int, kill_call: int) -> None:
    """One rank: goes on from what is there, saves after every step, some beside the next one. With `kill_call` it ends at that call."""
    import plait
    from plait.checkpoint.folder import remove_old
    from plait.engine import generators

    notes = Notes(Path(folder) / "notes")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.1), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 8)
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "faults": {"timeout_seconds": 60},
    }
    engine = plait.initialize(
        model,
        config,
        loss_fn=plait.WeightedLoss(lambda output, batch: (output.square().sum(), len(output)), len),
    )
    generators.seed(0, engine.mesh, step=0)
    at = Path(folder) / "checkpoints"
    loaded = engine.load_checkpoint(at, on_note=lambda _: None)
    notes.add("resumed", rank, engine.global_steps if loaded is not None else -1)
    pending: list[int] = []

    def happens(call: int) -> None:
        if (rank, call) == (kill_rank, kill_call):
            notes.add("killed", f"rank {rank}: {layer.calls[-1]}")
            os.kill(os.getpid(), signal.SIGKILL)

    layer = Planted(happens)

    def durable() -> None:
        if rank == 0 and pending:
            notes.add("durable", pending[-1])
            remove_old(at, keep=2)
        pending.clear()

    while engine.global_steps < steps:
        step = engine.global_steps + 1
        batch = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = float(engine.train_batch(batch))
        if rank == 0:
            notes.add("loss", step, loss.hex())
        if engine.checkpoint_written(wait=True) is not None:
            durable()
        # The first save is like all others, and the calls are counted from the second: its tag was used before.
        with planted(layer) if loaded is not None or step > 2 else planted(Planted()):
            wait = step % 3 != 0
            engine.save_checkpoint(at, tag=KEEPS[keeps](step), wait=wait)
            pending.append(step)
            if wait:
                durable()
            else:
                engine.checkpoint_written(wait=True)
                durable()
    engine.close()


def found_in(folder: Path) -> tuple[CheckpointFolder | None, str]:
    """(what a run would go on from, why a newer one is not it)."""
    why = ""
    for one in candidates(folder / "checkpoints"):
        try:
            Reader(one).verify("full")
            return one, why
        except CheckpointError as error:
            why = str(error)
    return None, why


class Reference:
    """A run that is not killed."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.steps = steps
        self.contents: dict[int, tuple[str, str]] = {}
        self.losses: dict[int, str] = {}
        self.calls: list[list[str]] = []
        """By rank."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        ranks = Ranks(recorded, WORLD, str(folder), steps, log=folder / "log")
        if any(ranks.wait(300).values()):
            raise SystemExit(
                f"the run without kills failed:\n{(folder / 'log').read_text()[-3000:]}"
            )
        notes = Notes(folder / "notes")
        self.losses = {step: loss for _, _, step, loss in notes.read("loss")}
        self.contents = {step: (content, own) for _, _, step, content, own in notes.read("content")}
        self.calls = [
            calls for _, _, rank, calls in sorted(notes.read("calls of"), key=lambda one: one[2])
        ]


def recorded(rank: int, folder: str, steps: int) -> None:
    """`train` without kills, that writes down the hashes of every checkpoint, and the calls of a save of each rank."""
    from unittest.mock import patch

    import plait
    from plait.checkpoint.format import read_manifest

    notes, honest = Notes(Path(folder) / "notes"), plait.Engine.save_checkpoint

    def save(engine: Any, at: Any, *, tag: str, wait: bool) -> Any:
        layer = Planted()
        with planted(layer):
            path = honest(engine, at, tag=tag)
        if rank == 0:
            manifest = read_manifest(Path(at) / tag)
            notes.add("content", engine.global_steps, manifest.content, manifest.own_content)
        if engine.global_steps == 3:
            notes.add("calls of", rank, layer.calls)
        return path

    with patch.object(plait.Engine, "save_checkpoint", save):
        train(rank, folder, steps, "last", -1, -1)


def kill_saves(
    folder: Path,
    *,
    at_calls: int,
    random_kills: int,
    steps: int,
    most: int | None = None,
    seed: int = 0,
) -> Kills:
    """`at_calls`: how often each call of each rank is killed; `most`: only so many of these kills, drawn."""
    began, chance, found = time.monotonic(), random.Random(seed), Kills()
    reference = Reference(folder / "reference", steps)
    planned: list[Plan] = []
    for _ in range(at_calls):
        planned += [
            (rank, call, name)
            for rank, calls in enumerate(reference.calls)
            for call, name in enumerate(calls)
        ]
    planned = planned if most is None else chance.sample(planned, min(most, len(planned)))
    planned += [(index % WORLD, -1, "") for index in range(random_kills)]
    chance.shuffle(planned)
    left = iter(planned)
    keeps = cycle(KEEPS)
    while _run(folder / "killed", next(keeps), reference, left, found, chance):
        pass
    found.seconds = time.monotonic() - began
    return found


def _run(
    folder: Path,
    keeps: str,
    reference: Reference,
    planned: Iterator[Plan],
    found: Kills,
    chance: random.Random,
) -> bool:
    """A run that is killed until it ends; whether more kills are planned."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    notes, log, more, attempts = Notes(folder / "notes"), folder / "log", True, 0
    while True:
        plan = next(planned, None)
        more = plan is not None
        rank, call, name = plan or (-1, -1, "")
        attempts += 1
        before = len(notes.read())
        ranks = Ranks(train, WORLD, str(folder), reference.steps, keeps, rank, call, log=log)
        if more and call < 0:
            _kill_at_random(ranks, rank, notes, before, chance)
        statuses = ranks.wait(120)
        killed = more and statuses[rank] == -signal.SIGKILL
        if killed:
            found.kills += 1
            found.by_rank[rank] = found.by_rank.get(rank, 0) + 1
            found.at_calls += call >= 0
            found.names += [name for _, _, name in notes.read("killed")[-1:] if call >= 0]
        where = f"tags {keeps}, attempt {attempts}, rank {rank}, {name or 'at a random time'}"
        _look(folder, notes, reference, found, where)
        if not any(statuses.values()):
            break
        if not killed:
            found.wrong.append(
                f"{where}: exit codes {statuses} without a kill: {log.read_text()[-600:]}"
            )
            break
    losses = {step: loss for _, _, step, loss in notes.read("loss")}
    per_step: dict[int, set[str]] = {}
    for _, _, step, loss in notes.read("loss"):
        per_step.setdefault(step, set()).add(loss)
    found.runs += 1
    found.resumed += sum(step >= 0 for _, _, rank, step in notes.read("resumed") if rank == 0)
    one, _ = found_in(folder)
    end = (one.manifest.content, one.manifest.own_content) if one is not None else None
    if (
        losses != reference.losses
        or any(len(values) > 1 for values in per_step.values())
        or end != reference.contents[reference.steps]
    ):
        found.other_ends += 1
        found.wrong.append(
            f"tags {keeps}: losses or the last state are not those of the run without kills"
        )
    return more


def _kill_at_random(
    ranks: Ranks, rank: int, notes: Notes, before: int, chance: random.Random
) -> None:
    """Within the first few steps and saves after the ranks have resumed."""
    ends = time.monotonic() + 60
    while (
        time.monotonic() < ends
        and ranks.poll()
        and not any(one[0] == "resumed" for one in notes.read()[before:])
    ):
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.25))
    ranks.kill(rank)


def _look(folder: Path, notes: Notes, reference: Reference, found: Kills, where: str) -> None:
    durable = max((step for _, _, step in notes.read("durable")), default=0)
    try:
        one, why = found_in(folder)
    except CheckpointError as error:
        one, why = None, str(error)
    step = int(one.manifest.metadata["global_steps"]) if one is not None else 0
    if step < durable:
        found.lost += 1
        found.wrong.append(
            f"{where}: step {durable} was durable, and step {step} is what is there ({why})"
        )
    if (
        one is not None
        and (one.manifest.content, one.manifest.own_content) != reference.contents[step]
    ):
        found.mixed += 1
        found.wrong.append(f"{where}: the checkpoint of step {step} is none of that step")
