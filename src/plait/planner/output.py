"""Output of a plan: a configuration for `plait train`, and a JSON file with all predictions.

The configuration is the user's file with values in place of "auto" and of missing options. Other
values of the file do not change. Invariant: for the planned number of processes, the configuration
resolves to the layout that was estimated.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.config.dialects.examine import apply_override, examine, value_at
from plait.config.resolving.resolve import load, outline
from plait.config.source import Document
from plait.errors import InputError, raise_problems
from plait.files import write_atomically_in_folder
from plait.hashing import sha256_of
from plait.planner.calibrate import facts_of, layout_facts
from plait.planner.job import CONTEXT, RECOMPUTE, SCHEDULES
from plait.planner.memory import MEMORY_TERMS as MEMORY_TERMS
from plait.planner.request import Request, lower_end
from plait.planner.search import LayoutChoice, Plan
from plait.planner.step_time import STEP_TERMS
from plait.planner.techniques import RECOMPUTE_NAMES, SCHEDULE_NAMES
from plait.sizes import GIB


def config_of(
    request: Request, choice: LayoutChoice, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the training configuration for a layout of a plan.

    Args:
        request: Model, cluster and batch of the plan.
        choice: The layout.
        base: The user's configuration. Its values and option names are kept. Options that are
            missing or "auto" are filled in.
    """
    tree = copy.deepcopy(dict(base or {}))
    for path, value in chosen(request, choice, base).items():
        problem = apply_override(tree, tuple(path.split(".")), value)
        assert problem is None, problem
    return tree


def check_runs(request: Request, tree: Mapping[str, Any]) -> None:
    """Raise ConfigError if the settings of a planned configuration contradict each other.

    Options that the caller sets later may still be "auto" (Transformers sets lr).
    """
    draft = outline(load(tree), world_size=request.cluster.devices)
    raise_problems([problem for problem in draft.problems if problem.value != "auto"])


def chosen(
    request: Request, choice: LayoutChoice, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the options that `config_of` adds to `base`, keyed by the names that `base` uses."""
    examined = examine(Document("the file", dict(base or {})))
    layout = choice.layout
    planned: dict[str, Any] = {
        "train_batch_size": request.global_batch,
        "train_micro_batch_size_per_gpu": int(layout["micro_batch"]),
        "gradient_accumulation_steps": int(layout["accumulation"]),
        "zero_optimization.stage": int(layout["stage"]),
        **{
            f"parallel.{name}": int(layout[name])
            for name in ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
        },
        "parallel.sequence_parallel": bool(layout["sp"]),
        "parallel.recompute.mode": RECOMPUTE_NAMES[RECOMPUTE[int(layout["recompute"])]],
        "zero_optimization.offload_optimizer.device": "cpu" if layout["offload"] else "none",
        "fp16.enabled": request.precision == "fp16",
        "bf16.enabled": request.precision == "bf16",
        "compile.enabled": request.compile,
        "data.sequence_length": request.sequence,
    }
    if 0 < layout["offload"] < 1:
        planned["zero_optimization.offload_optimizer.ratio"] = layout["offload"]
    if layout["cp"] > 1:
        planned["parallel.context"] = CONTEXT[int(layout["context"])]
    if layout["every"] > 1:
        planned["parallel.recompute.every"] = int(layout["every"])
    if choice.budget is not None:
        planned["parallel.recompute.budget_gib"] = round(choice.budget / GIB, 2)
    if layout["loss_chunk"]:
        planned["parallel.loss_chunk_tokens"] = int(layout["loss_chunk"])
    if layout["pp"] > 1:
        planned |= {
            "parallel.pipeline.schedule": SCHEDULE_NAMES[choice.schedule],
            "parallel.pipeline.stages_per_rank": int(layout["vpp"]),
        }

    if request.precision != request.reduce:
        planned["communication_data_type"] = request.reduce
    if "model" not in examined.tree:
        planned["model"] = dict(request.model.section)

    values = {}
    for path, value in planned.items():
        current = value_at(examined.tree, path)
        is_missing = current is None and value != _IMPLIED_VALUES.get(path)
        if is_missing or _is_open(path, current):
            values[examined.written.get(path, path)] = value
    return values


_IMPLIED_VALUES: dict[str, Any] = {
    "parallel.cp": 1,
    "parallel.ep": 1,
    "parallel.recompute.mode": "none",
    "zero_optimization.offload_optimizer.device": "none",
    "fp16.enabled": False,
    "bf16.enabled": False,
    "compile.enabled": False,
}
"""Values that a configuration expresses by leaving the option out."""


def _is_open(path: str, value: Any) -> bool:
    """Return True if the value of an option is "auto", or -1 for a data-parallel degree."""
    return value == "auto" or (
        path in ("parallel.dp_replicate", "parallel.dp_shard") and value in (-1, "-1")
    )


def sidecar_of(plan: Plan, choice: LayoutChoice) -> dict[str, Any]:
    """Return the predictions for a layout, term by term, for comparison with measurements."""
    request = plan.request
    return {
        "cluster": {
            "device": str(request.cluster.device.name),
            "devices": request.cluster.devices,
            "devices_per_node": int(request.cluster.device.devices_per_node),
            "memory_bytes": float(request.cluster.device.memory_bytes),
        },
        "model": str(request.model.architecture.name),
        "parameters": int(request.model.architecture.parameters),
        "global_batch": request.global_batch,
        "sequence": request.sequence,
        "precision": request.precision,
        "compiled": request.compile,
        "priced": {
            "architecture": facts_of(request.model.architecture),
            "model": dict(request.model.section),
            "layout": layout_facts(choice.layout),
            "reduce": request.reduce,
            "optimizer_states": request.optimizer_states,
        },
        **choice_as_json(choice),
    }


def choice_as_json(choice: LayoutChoice) -> dict[str, Any]:
    """Return a layout and its predicted costs as JSON values."""
    layout = {name: value for name, value in choice.layout.items() if name != "offload_activations"}
    names = {
        "schedule": SCHEDULES,
        "context": CONTEXT,
        "recompute": [RECOMPUTE_NAMES[name] for name in RECOMPUTE],
    }
    layout |= {name: labels[int(layout[name])] for name, labels in names.items()}

    return {
        "layout": layout,
        "step": {
            "seconds": choice.seconds,
            "low_90": choice.seconds_low,
            "high_90": choice.seconds_high,
            "tokens_per_second": choice.tokens_per_second,
            "mfu": choice.mfu,
            "terms_seconds": dict(choice.terms),
            "meaning": STEP_TERMS,
        },
        "memory": {
            "allocated_bytes": choice.allocated,
            "reserved_bytes": choice.reserved,
            "needed_bytes": choice.needed_bytes,
            "needed_low_90_bytes": lower_end(choice.needed_bytes, choice.needed_high_bytes),
            "needed_high_90_bytes": choice.needed_high_bytes,
            "fit_probability": choice.fit_probability,
            "peak_moment": choice.moment,
            "terms_bytes": dict(choice.memory_terms),
            "meaning": MEMORY_TERMS,
        },
    }


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values."""
    shortages = [
        {
            "region": shortage.region,
            "candidates": shortage.candidates,
            "needed_bytes": shortage.needed_bytes,
            "room_bytes": shortage.room,
            "parts": dict(shortage.parts),
        }
        for shortage in plan.shortages
    ]
    return {
        "candidates": plan.candidates,
        "fitting": plan.fitting,
        "ties": plan.ties,
        "best": list(map(choice_as_json, plan.best)),
        "excluded": [{"region": e.region, "rule": e.rule} for e in plan.excluded],
        "do_not_fit": shortages,
    }


def write(plan: Plan, path: str | Path, base: Mapping[str, Any] | None = None) -> tuple[Path, Path]:
    """Write the best layout as a configuration, and its predictions to `<name>.plan.json`.

    Args:
        plan: Plan with at least one layout.
        path: File that ends in .json.
        base: Configuration of the user that the plan completes.

    Returns:
        Path of the configuration and path of the predictions.

    Raises:
        InputError: A file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".json":
        raise InputError(
            f"{path}: the configuration is written as JSON; pass a name that ends in .json"
        )
    sidecar_path = path.with_suffix(".plan.json")
    best = plan.best[0]
    text = json.dumps(config_of(plan.request, best, base), indent=2) + "\n"
    sidecar = sidecar_of(plan, best) | {"asked": base, "sha256": sha256_of(text)}
    write_atomically_in_folder(path, text)
    write_atomically_in_folder(sidecar_path, json.dumps(sidecar, indent=2) + "\n")
    return path, sidecar_path


def is_unchanged(path: Path) -> bool:
    """Return True if a configuration file has not been changed since `write` created it."""
    try:
        sidecar = json.loads(path.with_suffix(".plan.json").read_text(encoding="utf-8"))
        return bool(sidecar["sha256"] == sha256_of(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return False
