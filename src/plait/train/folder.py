"""The folder of a run: what lies where, whether it holds a run to go on with, and starting over
without losing it.

    config.json     the resolved configuration of the last start     tokenizer/      opens in
    AutoTokenizer.from_pretrained metrics.jsonl   everything that happened, one event a line
    checkpoints/    unless run.checkpoints is elsewhere links.json      measured links, where there
    was a choice          generation_config.json   of the model that it began with

A folder goes on only with the model, the text and the seed it was begun with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from plait import exact
from plait.checkpoint.folder import complete, find
from plait.checkpoint.places import Place
from plait.errors import CheckpointError, InputError, Problem, refuse
from plait.files import RUN_LOCK, is_only_writer, write_whole
from plait.train.loop import Position

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from plait.config.resolving.resolve import Resolved


GENERATION = "generation_config.json"


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run."""

    path: Path
    kept_at: Place | None = None
    """Where checkpoints are, if not here."""

    @property
    def checkpoints(self) -> Place:
        """Where checkpoints are."""
        return self.kept_at or self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The file of events."""
        return self.path / "metrics.jsonl"

    @property
    def links(self) -> Path:
        """What the start of the run measured of the links between its processes."""
        return self.path / "links.json"

    def position(self, identity: dict[str, Any]) -> Position:
        """How far the run in the folder is; `Position()` where none was begun.

        Raises ConfigError when it was begun with another model, text or seed than `identity` says,
        naming each difference.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"run.folder = {str(self.path)!r}: is a file; name a folder")
        found = find(self.checkpoints)
        if found is None:
            return Position()
        checkpoint = found.path
        state = exact.decode(found.manifest.metadata.get("client_state"), where="client_state")
        if not isinstance(state, dict) or not {"identity", "step", "samples"} <= state.keys():
            raise CheckpointError(
                f"{checkpoint} was not written by plait train; set run.folder to a folder of"
                " its own"
            )
        _refuse_differences(checkpoint, state["identity"], identity)
        return Position(state["step"], state["samples"])

    def changes(self, resolved: Resolved) -> list[str]:
        """`name: old to new` for every value that the last start of this run had otherwise."""
        if not (self.path / "config.json").is_file() or find(self.checkpoints) is None:
            return []
        was, now = (
            _flat(json.loads(text))
            for text in ((self.path / "config.json").read_text(), resolved.model_dump_json())
        )
        return [
            f"{name}: {was.get(name)} to {now.get(name)}"
            for name in sorted(was.keys() | now.keys())
            if was.get(name) != now.get(name)
        ]

    def write(
        self, resolved: Resolved, tokenizer: PreTrainedTokenizerBase, weights: Path | None
    ) -> None:
        """Keep the configuration and the tokenizer next to the checkpoints, with the settings of
        generation of the model that it begins with (`weights`): the end of an answer, and what its
        authors sample with.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.path / "config.json", resolved.model_dump_json(indent=2) + "\n")
        tokenizer.save_pretrained(self.path / "tokenizer")
        if weights is not None and (weights / GENERATION).is_file():
            write_whole(self.path / GENERATION, (weights / GENERATION).read_text(encoding="utf-8"))

    def claim(self) -> BinaryIO:
        """Hold the folder until the file is closed or the process ends. Raises InputError where
        another run holds it: two would overwrite each other's checkpoints and metrics.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        stream = open(self.path / RUN_LOCK, "ab")  # noqa: SIM115
        if not is_only_writer(stream):
            stream.close()
            raise InputError(
                f"run.folder = {str(self.path)!r}: another plait train is running in it; wait for"
                " its end, or name another folder"
            )
        return stream

    def set_aside(self) -> Path | None:
        """Rename the folder to the first free `<name>.old-N` and return that; None where there is
        nothing to keep. Raises InputError where checkpoints are elsewhere, and stay.
        """
        if self.kept_at is not None and complete(self.kept_at):
            raise InputError(
                f"run.checkpoints = {str(self.kept_at)!r}: holds those of the run so far, and"
                " --fresh renames run.folder only; name another"
            )
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return None
        self.claim().close()
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        return self.path.rename(aside)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` to `{"a.b": 1}`, without `sources`, which tells where values came from and
    not what they are.
    """
    if not isinstance(value, dict):
        return {name: value}
    found: dict[str, Any] = {}
    for part, inner in value.items():
        if part != "sources":
            found |= _flat(inner, f"{name}.{part}" if name else part)
    return found


def _refuse_differences(checkpoint: Place, was: dict[str, Any], now: dict[str, Any]) -> None:
    remedy = "set it back, name another run.folder, or start over with --fresh"
    # Fields that only one side has come from another version of Transformers; the checkpoint's
    # shapes are compared when it is loaded.
    problems = [
        Problem(name, now[name], f"{checkpoint} was made with {was[name]!r}", remedy)
        for name in sorted(was.keys() & now.keys())
        if was[name] != now[name]
    ]
    refuse(problems)
