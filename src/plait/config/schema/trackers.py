"""Settings of experiment trackers, in DeepSpeed's sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

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
    """Folder that contains the folder of the tracker. If omitted, `run.folder`, or the working
    folder in a file without `run`.
    """
    job_name: str = "DeepSpeedJobName"
    """Name of the folder of the tracker. If omitted in a file with `run`, the tracker's name."""


class CsvMonitorSection(Policy):
    """CSV files."""

    enabled: Flag = False
    """Write one CSV file per number, with a row per step, on the first process."""
    output_path: Folder = "."
    """Folder that contains the folder of the tracker. If omitted, `run.folder`, or the working
    folder in a file without `run`.
    """
    job_name: str = "DeepSpeedJobName"
    """Name of the folder of the tracker. If omitted in a file with `run`, the tracker's name."""


class WandbSection(Policy):
    """Weights & Biases."""

    enabled: Flag = False
    """Send the numbers of every step to Weights & Biases, from the first process."""
    project: str = "deepspeed"
    """Project of the run. If omitted in a file with `run`, `plait`."""
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
    """Enabled tracker of a run."""

    name: TrackerName
    """Tracker."""
    settings: dict[str, Any]
    """Settings of the tracker, named as in its section."""
