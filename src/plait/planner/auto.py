"""A configuration with "auto" in it, completed by a search: what it fixes is kept, "auto" is chosen, what it omits has its default.

Works on the tree of a file, before the schema sees it, so any field of the layout may say "auto". Pure; who has the cluster calls it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from plait.config.degrees import PLANNED
from plait.errors import ConfigError, InputError, Problem
from plait.planner.calibrate import Calibration
from plait.planner.hardware import Cluster
from plait.planner.job import RECOMPUTE
from plait.planner.models import Model, find_model, from_config
from plait.planner.offers import RECOMPUTE_NAMES
from plait.planner.output import config_of
from plait.planner.search import Plan, Request, plan

FIELDS: dict[str, tuple[str, Any]] = {
    "parallel.tp": ("tp", 1),
    "parallel.pp": ("pp", 1),
    "parallel.sequence_parallel": ("sp", False),
    "parallel.dp_replicate": ("dp_replicate", "auto"),
    "parallel.dp_shard": ("dp_shard", "auto"),
    "parallel.recompute.mode": ("recompute", "none"),
    "zero_optimization.stage": ("stage", 0),
    "train_micro_batch_size_per_gpu": ("micro_batch", "auto"),
    "gradient_accumulation_steps": ("accumulation", "auto"),
}
"""Path in a file to the field of a layout, and what it means to leave the path out."""


def asks(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths that say "auto" and that a search can answer."""
    return tuple(path for path in FIELDS if _at(tree, path) == "auto")


def searched(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """The paths that say "auto" and that nothing but a search answers."""
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    open_sizes = [path for path in sizes if _at(tree, path) == "auto"]
    follows = len(open_sizes) < 2 and all(_at(tree, path) is not None for path in sizes)  # one from the other and the whole batch
    return tuple(path for path in asks(tree) if path in PLANNED or (path in open_sizes and not follows))


def without(tree: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """A copy in which some paths are left out."""
    whole = copy.deepcopy(dict(tree))
    for path in paths:
        *sections, name = path.split(".")
        here = whole
        for section in sections:
            here = here[section]
        del here[name]
    return whole


def complete(tree: Mapping[str, Any], *, cluster: Cluster, calibration: Calibration | None = None) -> tuple[dict[str, Any], Plan]:
    """(the configuration with nothing of the layout left open, the plan it comes from).

    Raises ConfigError where the file has no model or no batch to plan for, or fixes what cannot be, and InputError where nothing fits.
    """
    request = request_of(tree, cluster)
    found = plan(request, fixed=_fixed(tree), calibration=calibration, best=1)
    if not found.best:
        least = min(found.shortages, key=lambda shortage: shortage.needed, default=None)
        why = f"{least.region} {least}" if least else "no layout fits with enough certainty"
        raise InputError(f'"auto": nothing fits on {cluster}: {why}; use more or larger GPUs, or fix less')
    return config_of(request, found.best[0], tree), found


def request_of(tree: Mapping[str, Any], cluster: Cluster) -> Request:
    """What is planned for a file. Raises ConfigError where it does not say enough."""
    section = tree.get("model")
    data = tree.get("data") or {}
    problems = []
    batch = tree.get("train_batch_size")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        problems.append(Problem("train_batch_size", batch, 'what "auto" is planned for', "give the samples of an optimizer step"))
    if not isinstance(section, Mapping) or not (section.get("config") or section.get("path")):
        problems.append(Problem("model", None, 'what "auto" is planned for', "give model.config or model.path"))
    if problems:
        raise ConfigError(*problems)
    assert isinstance(section, Mapping) and isinstance(batch, int)
    if section.get("config"):
        architecture = from_config(section["config"], source="model.config", vocab=data.get("vocab_size", 8192))
        model = Model(architecture, dict(section))
    else:
        model = Model(find_model(section["path"]).architecture, dict(section))
    precision = next((name for name in ("bf16", "fp16") if (tree.get(name) or {}).get("enabled") is True), "fp32")
    compiled = (tree.get("compile") or {}).get("enabled") is True
    states = (tree.get("optimizer") or {}).get("states", "own")
    return Request(model, cluster, batch, data.get("sequence_length", 256), precision, compiled, optimizer_states=states)


def _fixed(tree: Mapping[str, Any]) -> dict[str, int]:
    fixed = {}
    for path, (field, default) in FIELDS.items():
        value = _at(tree, path)
        value = default if value is None else value
        if value == "auto" or value == -1:
            continue
        if field == "recompute":
            named = {RECOMPUTE_NAMES[name]: index for index, name in enumerate(RECOMPUTE)}
            if value not in named:
                raise ConfigError(Problem(path, value, "not a mode that a plan can keep", f'use "auto" or {", ".join(named)}'))
            value = named[value]
        fixed[field] = int(value)
    return fixed


def _at(tree: Mapping[str, Any], path: str) -> Any:
    here: Any = tree
    for name in path.split("."):
        if not isinstance(here, Mapping):
            return None
        here = here.get(name)
    return here
