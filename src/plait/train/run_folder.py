"""Folder of a run: its paths, the position to resume from, and how to start over.

    config.json              resolved configuration of the last start
    tokenizer/               opens with AutoTokenizer.from_pretrained
    metrics.jsonl            all events, one per line
    checkpoints/             unless run.checkpoints names another place
    links.json               measured links between the processes, if they were measured
    generation_config.json   generation settings of the model that the run began with

A run is only resumed with the model, the text and the seed with which it was started.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from plait import exact
from plait.checkpoint.folder import find_checkpoint, list_complete
from plait.checkpoint.places import Place
from plait.errors import CheckpointError, InputError, Problem, raise_problems
from plait.files import RUN_LOCK, try_lock, write_atomically
from plait.train.loop import Position

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from plait.config.resolving.resolve import Resolved

GENERATION = "generation_config.json"
"""Name of the file with generation settings, as Transformers calls it."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run.

    Attributes:
        path: The folder.
        checkpoints_elsewhere: Folder of the checkpoints if `run.checkpoints` is set.
    """

    path: Path
    checkpoints_elsewhere: Place | None = None

    @property
    def checkpoints(self) -> Place:
        """Folder of the checkpoints."""
        return self.checkpoints_elsewhere or self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """File of the events."""
        return self.path / "metrics.jsonl"

    @property
    def links(self) -> Path:
        """File of the measured links between the processes."""
        return self.path / "links.json"

    def position(self, identity: dict[str, Any]) -> Position:
        """Return the progress of the run in the folder, or `Position()` without a checkpoint.

        Args:
            identity: Model, text and seed of the run that is about to start.

        Raises:
            ConfigError: The run was started with another model, text or seed. The message names
                each difference.
            InputError: The path is a file.
            CheckpointError: The checkpoint was not written by `plait train`.
        """
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"run.folder = {str(self.path)!r}: is a file; name a folder")
        newest = find_checkpoint(self.checkpoints)
        if newest is None:
            return Position()

        state = exact.decode(newest.manifest.metadata.get("client_state"), where="client_state")
        if not isinstance(state, dict) or not {"identity", "step", "samples"} <= state.keys():
            raise CheckpointError(
                f"{newest.path} was not written by plait train; set run.folder to a folder of"
                " its own"
            )
        _refuse_differences(newest.path, state["identity"], identity)
        return Position(state["step"], state["samples"])

    def changes(self, resolved: Resolved) -> list[str]:
        """Return `name: old to new` for every setting that differs from the last start."""
        config_file = self.path / "config.json"
        if not config_file.is_file() or find_checkpoint(self.checkpoints) is None:
            return []
        old = _flatten(json.loads(config_file.read_text()))
        new = _flatten(json.loads(resolved.model_dump_json()))
        changed: list[str] = []
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                changed.append(f"{name}: {old.get(name)} to {new.get(name)}")
        return changed

    def write(
        self, resolved: Resolved, tokenizer: PreTrainedTokenizerBase, weights: Path | None
    ) -> None:
        """Write the configuration, the tokenizer and the generation settings.

        Args:
            resolved: Configuration of the run.
            tokenizer: Tokenizer of the run.
            weights: Folder of the model that the run begins with, or None. Its generation settings
                are copied: the tokens that end an answer, and the sampling its authors recommend.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.json", resolved.model_dump_json(indent=2) + "\n")
        tokenizer.save_pretrained(self.path / "tokenizer")
        if weights is not None and (weights / GENERATION).is_file():
            write_atomically(
                self.path / GENERATION, (weights / GENERATION).read_text(encoding="utf-8")
            )

    def claim(self) -> BinaryIO:
        """Lock the folder until the returned file is closed or the process ends.

        Two runs in one folder would overwrite each other's checkpoints and metrics.

        Raises:
            InputError: Another run has locked it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        stream = open(self.path / RUN_LOCK, "ab")  # noqa: SIM115
        if not try_lock(stream):
            stream.close()
            raise InputError(
                f"run.folder = {str(self.path)!r}: another plait train is running in it; wait until"
                " it ends, or name another folder"
            )
        return stream

    def set_aside(self) -> Path | None:
        """Rename the folder to the first free `<name>.old-N`.

        Returns:
            The new path, or None if the folder is empty or does not exist.

        Raises:
            InputError: Checkpoints exist elsewhere, where renaming the folder does not move them.
        """
        if self.checkpoints_elsewhere is not None and list_complete(self.checkpoints_elsewhere):
            raise InputError(
                f"run.checkpoints = {str(self.checkpoints_elsewhere)!r}: holds the checkpoints of"
                " the run so far, and --fresh only renames run.folder; name another place"
            )
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return None
        # Fails if a run is using the folder.
        self.claim().close()
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        return self.path.rename(target)


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Return `{"a.b": 1}` for `{"a": {"b": 1}}`.

    The field `sources` is left out: it records where values come from, and is not a setting.
    """
    if not isinstance(value, dict):
        return {name: value}
    fields: dict[str, Any] = {}
    for key, nested in value.items():
        if key != "sources":
            fields |= _flatten(nested, f"{name}.{key}" if name else key)
    return fields


def _refuse_differences(checkpoint: Place, old: dict[str, Any], new: dict[str, Any]) -> None:
    remedy = "set it back, name another run.folder, or start over with --fresh"
    # Fields that only one side has come from another version of Transformers; the checkpoint's
    # shapes are compared when it is loaded.
    problems = []
    for name in sorted(old.keys() & new.keys()):
        if old[name] != new[name]:
            problems.append(
                Problem(name, new[name], f"{checkpoint} was created with {old[name]!r}", remedy)
            )
    raise_problems(problems)
