"""Runs whose saves are killed at every call to the file system and at random times.

After each kill the checkpoints are read. One that was reported as durable, or a newer one, must
exist (else it is lost), and each of its bytes must be that of the same step of a run without kills
(else it is mixed). The next attempt resumes from it. At the end, losses and states must have the
bits of the run without kills.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from plait.checkpoint.folder import CheckpointFolder, candidates
from plait.checkpoint.load import Reader
from plait.errors import CheckpointError
from tests.faulty_files import Planted, planted
from tools.faults.forks import Notes, Ranks

HIDDEN, WORLD = 32, 2
Plan = tuple[int, int, str]
"""Rank, number of the call (-1 for a random time), and name of the call."""
TAGS = {
    "last": lambda step: "last",
    "two": lambda step: f"tag-{step % 2}",
    "steps": lambda step: f"step-{step}",
}
"""How a run names its checkpoints: one tag, two in turn, or one per step with old ones deleted."""
_CHANGING = re.compile(r"(LATEST\.)[0-9a-f]+|(last|tag-\d|step-\d+)(?=\.|$| )")
"""Parts of the names of files that differ between saves."""


def kill_saves(
    folder: Path, *, per_call: int, random_kills: int, steps: int, most: int | None = None
) -> dict[str, Any]:
    """Kill a rank at each call of a save, and at random times.

    Args:
        folder: For the runs.
        per_call: Kills at each call of each rank.
        random_kills: Kills at random times.
        steps: Length of a run.
        most: Largest number of kills at calls. A sample is drawn if there are more.
    """
    chance = random.Random(0)
    reference = Reference(folder / "reference", steps)
    plans: list[Plan] = []
    for rank, calls in enumerate(reference.calls):
        plans += [(rank, call, name) for call, name in enumerate(calls)] * per_call
    if most is not None:
        plans = chance.sample(plans, min(most, len(plans)))
    plans += [(index % WORLD, -1, "") for index in range(random_kills)]
    chance.shuffle(plans)

    runs = _KilledRuns(folder / "killed", reference, iter(plans), chance)
    for tags in cycle(TAGS):
        if not runs.run(tags):
            return runs.row()
    raise AssertionError("a cycle does not end")


class Reference:
    """What a run without kills computes."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.steps = steps
        folder.mkdir(parents=True)
        ranks = Ranks(train_recorded, WORLD, str(folder), steps, log=folder / "log")
        if any(ranks.wait(300).values()):
            log = (folder / "log").read_text()
            raise SystemExit(f"the run without kills failed:\n{log[-3000:]}")
        notes = Notes(folder / "notes")
        self.losses = {step: loss for _, _, step, loss in notes.read("loss")}
        self.contents = {step: (content, own) for _, _, step, content, own in notes.read("content")}
        calls = {rank: names for _, _, rank, names in notes.read("calls of")}
        self.calls: list[list[str]] = [calls[rank] for rank in range(WORLD)]


class _KilledRuns:
    """Runs that are killed until they end, and what was found after each kill."""

    def __init__(
        self, folder: Path, reference: Reference, plans: Iterator[Plan], chance: random.Random
    ) -> None:
        self.folder = folder
        self.notes = Notes(folder / "notes")
        self._reference = reference
        self._plans = plans
        self._chance = chance
        self._counts = dict.fromkeys(
            ("kills", "at_calls", "lost", "mixed", "resumed", "runs", "other_ends"), 0
        )
        self._by_rank = dict.fromkeys(map(str, range(WORLD)), 0)
        self._names: set[str] = set()
        self._wrong: list[str] = []

    def row(self) -> dict[str, Any]:
        """Return the counts of all runs."""
        names = sorted(self._names)
        return {**self._counts, "names": names, "by_rank": self._by_rank, "wrong": self._wrong}

    def run(self, tags: str) -> bool:
        """Kill and resume a run until it ends. Return whether more kills are planned."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        attempts = 0
        plan: Plan | None = (-1, -1, "")
        while True:
            plan = next(self._plans, None)
            attempts += 1
            rank, call, name = plan or (-1, -1, "")
            statuses = self._attempt(tags, plan)
            killed = plan is not None and statuses[rank] == -signal.SIGKILL
            if killed:
                self._count_kill(rank, call)
            where = f"tags {tags}, attempt {attempts}, rank {rank}, {name or 'at a random time'}"
            self._check_checkpoint(where)
            if not any(statuses.values()):
                break
            if not killed:
                log = (self.folder / "log").read_text()
                self._wrong.append(f"{where}: exit codes {statuses} without a kill: {log[-600:]}")
                break
        self._check_end(tags)
        return plan is not None

    def _attempt(self, tags: str, plan: Plan | None) -> dict[int, int]:
        before = len(self.notes.read())
        rank, call, _ = plan or (-1, -1, "")
        arguments = (str(self.folder), self._reference.steps, tags, rank, call)
        ranks = Ranks(train, WORLD, *arguments, log=self.folder / "log")
        if plan is not None and call < 0:
            # Within the first few steps and saves after the ranks have resumed.
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and ranks.poll():
                if any(note[0] == "resumed" for note in self.notes.read()[before:]):
                    break
                time.sleep(0.002)
            time.sleep(self._chance.uniform(0, 0.25))
            ranks.kill(rank)
        return ranks.wait(120)

    def _count_kill(self, rank: int, call: int) -> None:
        self._counts["kills"] += 1
        self._by_rank[str(rank)] += 1
        if call < 0:
            return
        self._counts["at_calls"] += 1
        for _, _, name in self.notes.read("killed")[-1:]:
            self._names.add(_CHANGING.sub(lambda part: f"{part[1]}*" if part[1] else "TAG", name))

    def _check_checkpoint(self, where: str) -> None:
        durable = max((step for _, _, step in self.notes.read("durable")), default=0)
        try:
            checkpoint, reason = newest(self.folder)
        except CheckpointError as error:
            checkpoint, reason = None, str(error)
        step = int(checkpoint.manifest.metadata["global_steps"]) if checkpoint else 0
        if step < durable:
            self._counts["lost"] += 1
            self._wrong.append(f"{where}: step {durable} was durable, found {step} ({reason})")
        if checkpoint and _content(checkpoint) != self._reference.contents[step]:
            self._counts["mixed"] += 1
            self._wrong.append(f"{where}: the checkpoint of step {step} has other contents")

    def _check_end(self, tags: str) -> None:
        losses: dict[int, set[str]] = defaultdict(set)
        for _, _, step, loss in self.notes.read("loss"):
            losses[step].add(loss)
        resumed = [step for _, _, rank, step in self.notes.read("resumed") if rank == 0]
        self._counts["runs"] += 1
        self._counts["resumed"] += sum(step >= 0 for step in resumed)
        expected = {step: {loss} for step, loss in self._reference.losses.items()}
        last, _ = newest(self.folder)
        is_same = last and _content(last) == self._reference.contents[self._reference.steps]
        if losses != expected or not is_same:
            self._counts["other_ends"] += 1
            self._wrong.append(
                f"tags {tags}: other losses or another last state than without kills"
            )


def newest(folder: Path) -> tuple[CheckpointFolder | None, str]:
    """Return the checkpoint that a run resumes from, and why a newer one cannot be used."""
    reason = ""
    for candidate in candidates(folder / "checkpoints"):
        try:
            Reader(candidate).verify("full")
            return candidate, reason
        except CheckpointError as error:
            reason = str(error)
    return None, reason


def _content(checkpoint: CheckpointFolder) -> tuple[str, str]:
    return checkpoint.manifest.content, checkpoint.manifest.own_content


def train(rank: int, folder: str, steps: int, tags: str, kill_rank: int, kill_call: int) -> None:
    """Run one rank: resume, and save after every step, some asynchronously.

    The process of `kill_rank` kills itself at call `kill_call` of its saves.
    """
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
    checkpoints = Path(folder) / "checkpoints"
    loaded = engine.load_checkpoint(checkpoints, on_note=lambda _: None)
    notes.add("resumed", rank, engine.global_steps if loaded is not None else -1)

    def kill(call: int) -> None:
        if (rank, call) == (kill_rank, kill_call):
            notes.add("killed", f"rank {rank}: {layer.calls[-1]}")
            os.kill(os.getpid(), signal.SIGKILL)

    layer = Planted(kill)
    while engine.global_steps < steps:
        step = engine.global_steps + 1
        batch = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = float(engine.train_batch(batch))
        if rank == 0:
            notes.add("loss", step, loss.hex())
        # Calls are counted from the second save on, whose tag exists.
        counts = loaded is not None or step > 2
        with planted(layer if counts else Planted()):
            waits = step % 3 != 0
            engine.save_checkpoint(checkpoints, tag=TAGS[tags](step), wait=waits)
            if not waits:
                engine.checkpoint_written(wait=True)
            if rank == 0:
                notes.add("durable", step)
                remove_old(checkpoints, keep=2)
    engine.close()


def train_recorded(rank: int, folder: str, steps: int) -> None:
    """Run `train` without kills. Record the hashes of checkpoints and the calls of a save."""
    import plait
    from plait.checkpoint.format import read_manifest

    notes = Notes(Path(folder) / "notes")
    save_checkpoint = plait.Engine.save_checkpoint

    def save(engine: Any, checkpoints: Any, *, tag: str, wait: bool) -> Any:
        layer = Planted()
        with planted(layer):
            path = save_checkpoint(engine, checkpoints, tag=tag)
        if rank == 0:
            manifest = read_manifest(Path(checkpoints) / tag)
            notes.add("content", engine.global_steps, manifest.content, manifest.own_content)
        if engine.global_steps == 3:
            notes.add("calls of", rank, layer.calls)
        return path

    with patch.object(plait.Engine, "save_checkpoint", save):
        train(rank, folder, steps, "last", -1, -1)
