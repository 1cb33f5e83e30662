"""Settings of experiment trackers: sections of DeepSpeed files, and entries of `run.trackers`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from plait.config.values.numbers import Flag, LocalPath
from plait.policy import Policy


def _parse_folder(value: Any) -> Any:
    """Convert "", which DeepSpeed files write for the working folder, to "."."""
    if value == "":
        return "."
    return value


Folder = Annotated[LocalPath, BeforeValidator(_parse_folder)]
"""Folder of this machine."""
TrackerName = Literal["tensorboard", "wandb", "comet", "csv_monitor"]


class TensorboardSection(Policy):
    """TensorBoard."""

    enabled: Flag = False
    """Write the numbers of every step for TensorBoard, on the first process."""
    output_path: Folder = "."
    """Folder that contains the folder of the run. If omitted, the working folder, or `run.folder`
    for an entry of `run.trackers`.
    """
    job_name: str = "DeepSpeedJobName"
    """Name of the folder of the run."""


class CsvMonitorSection(Policy):
    """CSV files."""

    enabled: Flag = False
    """Write one CSV file per number, with a row per step, on the first process."""
    output_path: Folder = "."
    """Folder that contains the folder of the run. If omitted, the working folder, or `run.folder`
    for an entry of `run.trackers`.
    """
    job_name: str = "DeepSpeedJobName"
    """Name of the folder of the run."""


class WandbSection(Policy):
    """Weights & Biases."""

    enabled: Flag = False
    """Send the numbers of every step to Weights & Biases, from the first process."""
    project: str = "deepspeed"
    """Project of the run."""
    group: str | None = None
    """Group of the run."""
    team: str | None = None
    """Entity that owns the project."""


class CometSection(Policy):
    """Comet. It reads the API key from COMET_API_KEY or from its own configuration file."""

    enabled: Flag = False
    """Send the numbers of every step to Comet, from the first process."""
    project: str | None = None
    """Project of the experiment."""
    workspace: str | None = None
    """Workspace of the project."""
    experiment_name: str | None = None
    """Name of the experiment."""
    experiment_key: str | None = None
    """Key of an experiment to continue."""
    online: Flag | None = None
    """Send the numbers immediately (true) or store them in a file (false). If omitted, true."""
    mode: Literal["get", "create", "get_or_create"] | None = None
    """`get` continues an experiment, `create` starts a new one. If omitted, Comet decides."""


SECTIONS: dict[TrackerName, type[Policy]] = {
    "tensorboard": TensorboardSection,
    "wandb": WandbSection,
    "comet": CometSection,
    "csv_monitor": CsvMonitorSection,
}
"""Section of each tracker."""


class TrackerSpec(Policy):
    """Tracker of a run, written as a name or as an object with the name as its only key."""

    name: TrackerName
    """Tracker."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the tracker, named as in its section."""

    @model_validator(mode="before")
    @classmethod
    def _expand_short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in SECTIONS:
            ((name, settings),) = value.items()
            return {"name": name, "settings": settings}
        return value

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        section = SECTIONS[self.name]
        known = [name for name in section.model_fields if name != "enabled"]
        unknown = [name for name in self.settings if name not in known]
        if unknown:
            raise ValueError(f"{self.name} has no setting {unknown[0]!r}; use {', '.join(known)}")
        # Raises ValidationError for an invalid value.
        section(**self.settings)
        return self
