"""What a plan leaves behind: the configuration that `plait train` runs, and a sidecar with every predicted term.

The configuration has no "auto" left in what was planned. Invariant: it loads and resolves, for the planned number of processes, to the
layout that was priced.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import InputError
from plait.planner.history import facts_of, layout_facts
from plait.planner.job import RECOMPUTE, SCHEDULES
from plait.planner.memory import TERMS as MEMORY_TERMS
from plait.planner.offers import RECOMPUTE_NAMES, SCHEDULE_NAMES
from plait.planner.search import Choice, Plan, Request
from plait.planner.step import TERMS


def config_of(request: Request, choice: Choice, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration of a choice. What `base` says of anything that is not planned is kept."""
    at = choice.layout
    config: dict[str, Any] = copy.deepcopy(dict(base or {}))
    for name in ("gradient_accumulation_steps", "fp16", "bf16"):
        config.pop(name, None)
    config["train_batch_size"] = request.global_batch
    config["train_micro_batch_size_per_gpu"] = int(at["micro_batch"])
    config["gradient_accumulation_steps"] = int(at["accumulation"])
    zero = dict(config.get("zero_optimization") or {})
    config["zero_optimization"] = zero | {"stage": int(at["stage"])}
    if request.precision in ("bf16", "fp16"):
        config[request.precision] = {"enabled": True}
    parallel = dict(config.get("parallel") or {})
    for name in ("pp", "dp_replicate", "dp_shard", "tp"):
        parallel[name] = int(at[name])
    parallel["sequence_parallel"] = bool(at["sp"])
    parallel.pop("pipeline", None)
    if at["pp"] > 1:
        parallel["pipeline"] = {"schedule": SCHEDULE_NAMES[choice.schedule], "stages_per_rank": int(at["vpp"])}
    parallel.pop("recompute", None)
    if at["recompute"]:
        parallel["recompute"] = {"mode": RECOMPUTE_NAMES[RECOMPUTE[int(at["recompute"])]]}
    config["parallel"] = parallel
    if at["offload"]:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if request.compile:
        config["compile"] = dict(config.get("compile") or {}) | {"enabled": True}
    config.setdefault("model", dict(request.model.section))
    data = dict(config.get("data") or {})
    config["data"] = data | {"sequence_length": request.sequence}
    return config


def sidecar_of(plan: Plan, choice: Choice) -> dict[str, Any]:
    """Every predicted term of a choice, for whoever compares it with what is measured."""
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
        "priced": {"architecture": facts_of(request.model.architecture), "layout": layout_facts(choice.layout)},
        **choice_as_json(choice),
    }


def choice_as_json(choice: Choice) -> dict[str, Any]:
    """A choice as plain values."""
    layout = {name: value for name, value in choice.layout.items() if name not in ("recompute_share", "offload_activations", "ep")}
    layout |= {"schedule": SCHEDULES[int(layout["schedule"])], "recompute": RECOMPUTE_NAMES[RECOMPUTE[int(layout["recompute"])]]}
    return {
        "layout": layout,
        "step": {
            "seconds": choice.seconds,
            "low_90": choice.seconds_low,
            "high_90": choice.seconds_high,
            "tokens_per_second": choice.tokens_per_second,
            "mfu": choice.mfu,
            "terms_seconds": dict(choice.terms),
            "meaning": TERMS,
        },
        "memory": {
            "allocated_bytes": choice.allocated,
            "reserved_bytes": choice.reserved,
            "needed_bytes": choice.needed,
            "needed_high_90_bytes": choice.needed_high,
            "fit_probability": choice.fit_probability,
            "peak_moment": choice.moment,
            "terms_bytes": dict(choice.memory_terms),
            "meaning": MEMORY_TERMS,
        },
    }


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """A whole plan as plain values."""
    return {
        "candidates": plan.candidates,
        "fitting": plan.fitting,
        "best": [choice_as_json(choice) for choice in plan.best],
        "excluded": [{"region": e.region, "rule": e.rule} for e in plan.excluded],
        "do_not_fit": [
            {"region": s.region, "candidates": s.candidates, "needed_bytes": s.needed, "room_bytes": s.room, "parts": dict(s.parts)}
            for s in plan.shortages
        ],
    }


def write(plan: Plan, path: str | Path, base: Mapping[str, Any] | None = None) -> tuple[Path, Path]:
    """Write the best choice as a configuration and beside it `<name>.plan.json`, which holds what was asked for (`base`) too.

    Returns both. Raises InputError where they cannot be written."""
    path = Path(path)
    if path.suffix != ".json":
        raise InputError(f"{path}: the configuration is written as JSON; give a name that ends in .json")
    beside = path.with_suffix(".plan.json")
    best = plan.best[0]
    sidecar = sidecar_of(plan, best) | {"asked": base}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config_of(plan.request, best, base), indent=2) + "\n", encoding="utf-8")
        beside.write_text(json.dumps(sidecar, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
    return path, beside
