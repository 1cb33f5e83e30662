"""A training file in which the layout says "auto": planned for the devices that are here, and
written as the file that runs.

That file is next to the run's folder. As long as the training file asks for the same on as many
devices, the next start takes it as it is, so a run keeps its layout when it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plait.cli.launching.count import processes_of
from plait.cli.planning.request import cluster_for
from plait.config.resolving.resolve import look
from plait.errors import InputError
from plait.files import user_path
from plait.planner.auto import complete, read_file, searched
from plait.planner.explain import describe
from plait.planner.output import write
from plait.planner.unpriced import unpriced


def planned_file(
    file: Path,
    overrides: list[str],
    *,
    processes: int | None,
    fresh: bool,
    say: Callable[[str], None],
) -> Path | None:
    """The file with nothing of the layout left open, for that number of processes or for those that
    the file starts; None where `file` leaves nothing open that takes a search. Raises ConfigError
    or InputError for what cannot be planned.
    """
    _, found = look(file, overrides)
    asked = searched(found.tree)
    if not asked:
        return None
    told = read_file(found)
    run = told.config.run
    beside = (
        run.folder if run is not None and "folder" in run.model_fields_set else f"runs/{file.stem}"
    )
    path = user_path(f"{beside}.planned.json", "run.folder")
    cluster = cluster_for(gpus=processes or processes_of(told.config))
    if not fresh and _planned(path) == (found.raw, cluster.devices):
        say(f'{", ".join(asked)}: "auto" was planned before ({path})')
        return path
    _, plan = complete(told, cluster=cluster)
    write(plan, path, found.raw)
    best = plan.best[0]
    left_out = unpriced(told.config)
    if left_out:
        say(f"no plan prices {', '.join(left_out)}: what they change is not in the prediction")
    chosen = (
        f"{describe(best.layout)}, {best.seconds:.3g} s a step predicted, of {plan.candidates:,}"
        " layouts"
    )
    say(f'{", ".join(asked)}: "auto" is {chosen} ({path})')
    return path


def refuse_auto(file: Path, overrides: list[str]) -> None:
    """Raise InputError for a file that takes a search, in one of several processes that are there
    already.
    """
    _, found = look(file, overrides)
    asked = searched(found.tree)
    if asked and not found.problems:
        raise InputError(
            f'{file}: {", ".join(asked)} = "auto" is planned before processes are started, and'
            f" these are there already; run `plait plan {file} --out planned.json` and start"
            f" planned.json, or use `plait train {file}` on one machine"
        )


def _planned(path: Path) -> tuple[Mapping[str, Any], int] | None:
    """What the file at `path` was planned for: a configuration, and a number of devices."""
    try:
        content = json.loads(path.with_suffix(".plan.json").read_text(encoding="utf-8"))
        return (content["asked"], content["cluster"]["devices"]) if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
