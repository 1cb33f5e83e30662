"""Runs whose saves are killed at every call to the file system and at random times.

After each kill the checkpoints are read. One that was reported as durable, or a newer one, must
exist (else it is lost), and each of its bytes must be that of the same step of a run without kills
(else it is mixed). The next attempt resumes from it. At the end, losses and states must have the
bits of the run without kills.
"""

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

from plait.checkpoint.folder import CheckpointFolder
from plait.errors import CheckpointError
from tests.faulty_files import Planted, planted
from tools.faults.damage import newest
from tools.faults.forks import Notes, Ranks

HIDDEN, WORLD = 32, 2
Plan = tuple[int, int, str]
"""Rank, number of the call (-1 for a random time), and name of the call."""
NO_KILL: Plan = (-1, -1, "")
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
    for index in range(random_kills):
        plans.append((index % WORLD, -1, ""))
    chance.shuffle(plans)

    runs = _KilledRuns(folder / "killed", reference, iter(plans), chance)
    for tags in cycle(TAGS):
        if not runs.run(tags):
            break
    return runs.row


class Reference:
    """Losses and states of a run without kills, and the calls of its saves."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.steps = steps
        folder.mkdir(parents=True)
        ranks = Ranks(train_recorded, WORLD, folder, steps, log=folder / "log")
        if any(ranks.wait(300)):
            log = (folder / "log").read_text()
            raise SystemExit(f"the run without kills failed:\n{log[-3000:]}")
        notes = Notes(folder / "notes")
        self.losses = losses_by_step(notes)
        self.contents = {step: tuple(content) for _, _, step, content in notes.read("content")}
        calls = {rank: names for _, _, rank, names in notes.read("calls of")}
        self.calls: list[list[str]] = [calls[rank] for rank in range(WORLD)]


def losses_by_step(notes: Notes) -> dict[int, set[str]]:
    """Return the different losses of each step."""
    losses: dict[int, set[str]] = defaultdict(set)
    for _, _, step, loss in notes.read("loss"):
        losses[step].add(loss)
    return losses


class _KilledRuns:
    """Runs that are killed until they end, and what was found after each kill."""

    def __init__(
        self, folder: Path, reference: Reference, plans: Iterator[Plan], chance: random.Random
    ) -> None:
        self.folder = folder
        self.notes = Notes(folder / "notes")
        self.row: dict[str, Any] = dict.fromkeys(
            ("kills", "at_calls", "lost", "mixed", "resumed", "runs", "other_ends"), 0
        )
        self.row |= {"names": [], "by_rank": dict.fromkeys(map(str, range(WORLD)), 0), "wrong": []}
        self._reference = reference
        self._plans = plans
        self._chance = chance

    def run(self, tags: str) -> bool:
        """Kill and resume a run until it ends. Return whether more kills are planned."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        while True:
            plan = next(self._plans, NO_KILL)
            rank, call, name = plan
            codes = self._attempt(tags, plan)
            killed = plan != NO_KILL and codes[rank] == -signal.SIGKILL
            if killed:
                self._count_kill(rank, call)
            where = f"tags {tags}, rank {rank}, {name or 'at a random time'}"
            self._check_checkpoint(where)
            if any(codes) and not killed:
                log = (self.folder / "log").read_text()
                self.row["wrong"].append(f"{where}: codes {codes} without a kill: {log[-600:]}")
            if not killed:
                self._check_end(tags)
                return plan != NO_KILL

    def _attempt(self, tags: str, plan: Plan) -> list[int]:
        before = len(self.notes.read("resumed"))
        rank, call, _ = plan
        arguments = (self.folder, self._reference.steps, tags, rank, call)
        ranks = Ranks(train, WORLD, *arguments, log=self.folder / "log")
        if plan != NO_KILL and call < 0:
            # Within the first few steps and saves after the ranks have resumed.
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and ranks.running():
                if len(self.notes.read("resumed")) > before:
                    break
                time.sleep(0.002)
            time.sleep(self._chance.uniform(0, 0.25))
            ranks.kill(rank)
        return ranks.wait(120)

    def _count_kill(self, rank: int, call: int) -> None:
        self.row["kills"] += 1
        self.row["by_rank"][str(rank)] += 1
        if call < 0:
            return
        self.row["at_calls"] += 1
        name = self.notes.read("killed")[-1][2]
        name = _CHANGING.sub(lambda part: f"{part[1]}*" if part[1] else "TAG", name)
        self.row["names"] = sorted({*self.row["names"], name})

    def _check_checkpoint(self, where: str) -> None:
        durable = max((step for _, _, step in self.notes.read("durable")), default=0)
        try:
            checkpoint, reason = newest(self.folder / "checkpoints")
        except CheckpointError as error:
            checkpoint, reason = None, str(error)
        step = int(checkpoint.manifest.metadata["global_steps"]) if checkpoint else 0
        if step < durable:
            self.row["lost"] += 1
            self.row["wrong"].append(f"{where}: step {durable} was durable, not {step} ({reason})")
        if checkpoint and _content(checkpoint) != self._reference.contents[step]:
            self.row["mixed"] += 1
            self.row["wrong"].append(f"{where}: the checkpoint of step {step} has other contents")

    def _check_end(self, tags: str) -> None:
        self.row["runs"] += 1
        for _, _, rank, step in self.notes.read("resumed"):
            self.row["resumed"] += rank == 0 and step > 0
        last, _ = newest(self.folder / "checkpoints")
        is_same = last and _content(last) == self._reference.contents[self._reference.steps]
        if losses_by_step(self.notes) != self._reference.losses or not is_same:
            self.row["other_ends"] += 1
            self.row["wrong"].append(f"tags {tags}: losses or last state differ from the reference")


def _content(checkpoint: CheckpointFolder) -> tuple[str, str]:
    return checkpoint.manifest.content, checkpoint.manifest.own_content


def train(rank: int, folder: Path, steps: int, tags: str, kill_rank: int, kill_call: int) -> None:
    """Run one rank: resume, and save after every step, some asynchronously.

    The process of `kill_rank` kills itself at call `kill_call` of its saves.
    """
    import plait
    from plait.checkpoint.folder import remove_old
    from plait.engine import generators

    notes = Notes(folder / "notes")
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
    loss_fn = plait.WeightedLoss(lambda output, batch: (output.square().sum(), len(output)), len)
    engine = plait.initialize(model, config, loss_fn=loss_fn)
    generators.seed(0, engine.mesh, step=0)
    checkpoints = folder / "checkpoints"
    loaded = engine.load_checkpoint(checkpoints, on_note=lambda _: None)
    notes.add("resumed", rank, engine.global_steps)

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


def train_recorded(rank: int, folder: Path, steps: int) -> None:
    """Run `train` without kills. Record the hashes of checkpoints and the calls of a save."""
    import plait
    from plait.checkpoint.format import read_manifest

    notes = Notes(folder / "notes")
    save_checkpoint = plait.Engine.save_checkpoint

    def save(engine: Any, checkpoints: Path, *, tag: str, wait: bool) -> Any:
        layer = Planted()
        with planted(layer):
            path = save_checkpoint(engine, checkpoints, tag=tag)
        if rank == 0:
            manifest = read_manifest(checkpoints / tag)
            content = (manifest.content, manifest.own_content)
            notes.add("content", engine.global_steps, content)
        if engine.global_steps == 3:
            notes.add("calls of", rank, layer.calls)
        return path

    with patch.object(plait.Engine, "save_checkpoint", save):
        train(rank, folder, steps, "last", *NO_KILL[:2])
