"""Planning of training files whose layout contains "auto", for the devices of this machine.

The planned file is written next to the run's folder. While the training file and the number of
devices stay the same, later starts use the planned file, so that a resumed run keeps its layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plait.cli.planning.request import cluster_for, process_count
from plait.config.resolving.resolve import examine_source
from plait.errors import InputError
from plait.files import user_path
from plait.planner.auto import complete, paths_to_search, read_file
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
    """Plan the layout of a training file, and return the file with the planned layout.

    Args:
        file: The training file.
        overrides: Values of --set.
        processes: Number of processes. None for the number that the file starts.
        fresh: Whether to plan again if the file was planned before.
        say: Receives lines for the console.

    Returns:
        The planned file, or None if the layout has no "auto" that requires a search.

    Raises:
        ConfigError: The file is not valid.
        InputError: The file cannot be planned.
    """
    _, document = examine_source(file, overrides)
    searched_keys = paths_to_search(document.tree)
    if not searched_keys:
        return None
    training_file = read_file(document)
    run = training_file.config.run
    folder = f"runs/{file.stem}"
    if run is not None and "folder" in run.model_fields_set:
        folder = str(run.folder)
    path = user_path(f"{folder}.planned.json", "run.folder")
    cluster = cluster_for(gpus=processes or process_count(training_file.config))

    keys = ", ".join(searched_keys)
    if not fresh and _planned_for(path) == (document.raw, cluster.devices):
        say(f'{keys}: "auto" was planned before ({path})')
        return path

    _, plan = complete(training_file, cluster=cluster)
    write(plan, path, document.raw)
    best = plan.best[0]
    not_modelled = unpriced(training_file.config)
    if not_modelled:
        say(f"plans do not model {', '.join(not_modelled)}: the prediction lacks their effect")
    say(
        f'{keys}: "auto" is {describe(best.layout)}, {best.seconds:.3g} s per step predicted, of'
        f" {plan.candidates:,} layouts ({path})"
    )
    return path


def refuse_auto(file: Path, overrides: list[str]) -> None:
    """Raise InputError if a file must be planned. Processes of a launcher call it.

    They cannot plan, because the plan decides how the processes are started.
    """
    _, document = examine_source(file, overrides)
    searched_keys = paths_to_search(document.tree)
    if searched_keys and not document.problems:
        raise InputError(
            f'{file}: {", ".join(searched_keys)} = "auto" is planned before processes are started,'
            f" and these run already; run `plait plan {file} --out planned.json` and start"
            f" planned.json, or use `plait train {file}` on one machine"
        )


def _planned_for(path: Path) -> tuple[Mapping[str, Any], int] | None:
    """Return the configuration and the number of devices that a planned file was planned for."""
    try:
        if not path.is_file():
            return None
        content = json.loads(path.with_suffix(".plan.json").read_text(encoding="utf-8"))
        return content["asked"], content["cluster"]["devices"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
