"""JSON file of a calibration: constants of one kind of device, their uncertainty, and their origin.

`save` and `load` are inverse. The file of another device, or of another processor if the device is
a CPU, is refused, because its constants would silently be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plait.errors import InputError
from plait.files import write_atomically_in_folder
from plait.planner.calibrate import Calibration, Fit
from plait.planner.constants import Rates, knowledge

FORMAT = "plait calibration 1"


@dataclass(frozen=True)
class CalibrationOrigin:
    """Device that a calibration was measured on."""

    gpu: str
    machine: str = ""
    """Processor and threads per process, if the device is a CPU."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Description: time and source of the calibration."""


def save(path: Path, calibration: Calibration, origin: CalibrationOrigin) -> None:
    """Write the file. Raises InputError if it cannot be written."""
    content = {
        "format": FORMAT,
        "gpu": origin.gpu,
        "machine": origin.machine,
        "facts": dict(origin.facts),
        "time": _fit_facts(calibration.time),
        "memory": _fit_facts(calibration.memory),
    }
    write_atomically_in_folder(path, json.dumps(content, indent=1) + "\n")


def load(path: Path) -> tuple[Calibration, CalibrationOrigin]:
    """Read a calibration.

    Raises:
        InputError: The file is missing, or is not a calibration of this version's constants.
    """

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; name a file that `plait calibrate` wrote"
        ) from None
    except ValueError as error:
        raise InputError(
            f"{path}: not JSON ({error}); name a file that `plait calibrate` wrote"
        ) from None

    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path}: holds no {FORMAT!r}; write one with `plait calibrate`")
    try:
        calibration = Calibration(_fit(content["time"]), _fit(content["memory"]))
        return calibration, CalibrationOrigin(content["gpu"], content["machine"], content["facts"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read ({type(error).__name__}: {error}); write it anew with `plait"
            " calibrate`"
        ) from None


def refuse_other(path: Path, origin: CalibrationOrigin, *, gpu: str, machine: str) -> None:
    """Raise InputError if a calibration is for another device than the plan's."""
    if origin.gpu != gpu:
        raise InputError(
            f"{path}: is a calibration of {origin.gpu}, and the plan is for {gpu}; calibrate on"
            " that device"
        )

    if gpu == "cpu" and origin.machine != machine:
        raise InputError(
            f"{path}: is a calibration of {origin.machine!r}, and this is {machine!r}; calibrate"
            " here"
        )


def _fit_facts(fitted: Fit) -> dict[str, Any]:
    known = knowledge().constants
    deviations = np.sqrt(np.diag(fitted.covariance))
    return {
        "constants": {
            name: {
                "value": float(fitted.rates[name]),
                "deviation": float(deviation),
                "shipped": known[name].median,
                "shipped_deviation": known[name].width,
                "meaning": known[name].meaning,
            }
            for name, deviation in zip(fitted.names, deviations, strict=True)
        },
        "covariance": fitted.covariance.tolist(),
        "spread": fitted.spread,
        "rows": fitted.rows,
    }


def _fit(content: Mapping[str, Any]) -> Fit:
    known = knowledge()
    names = tuple(content["constants"])
    unknown = [name for name in names if name not in known.constants]
    if unknown:
        raise ValueError(f"no such constant: {', '.join(unknown)}")
    covariance = np.array(content["covariance"], dtype=np.float64)
    if covariance.shape != (len(names), len(names)):
        raise ValueError(f"a covariance of {covariance.shape} for {len(names)} constants")
    values = {
        **known.rates.values,
        **{name: float(entry["value"]) for name, entry in content["constants"].items()},
    }
    if not all(np.isfinite(value) and value > 0 for value in values.values()):
        raise ValueError("a constant is not a positive number")
    spread = float(content["spread"])
    if not (
        np.isfinite(covariance).all() and (np.diag(covariance) >= 0).all() and 0 <= spread < np.inf
    ):
        raise ValueError("a covariance or a spread is not a finite number, or below 0")
    return Fit(names, Rates(values), covariance, spread, int(content["rows"]))
