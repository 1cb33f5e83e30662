"""Every candidate layout of a model on a cluster, as arrays; and what was left out, by which rule and by how much.

Rules are those of the engine: heads divide over tp, every rank gets whole micro-batches, a pipeline has at least one layer a stage and as
many micro-batches as stages. What merely does not fit in memory is not left out here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from plait.errors import ConfigError, Problem
from plait.planner.architecture import Architecture
from plait.planner.hardware import FAMILIES, Cluster
from plait.planner.job import RECOMPUTE, SCHEDULES, Layouts
from plait.planner.offers import RECOMPUTE_INDEX, SCHEDULE_INDEX, Offers
from plait.planner.splits import Split

MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_MOST_CHUNKS = 8

FIXABLE = ("tp", "pp", "sp", "vpp", "schedule", "dp_replicate", "dp_shard", "stage", "recompute", "offload", "micro_batch", "accumulation")
"""Fields that a user can fix (`tp=4`, `stage=3`, `recompute=full`)."""
_OTHER_NAMES = {"zero": "stage", "mbs": "micro_batch", "micro-batch": "micro_batch", "dp-shard": "dp_shard", "dp-replicate": "dp_replicate"}


_WORDS = {
    "schedule": {name: index for index, name in enumerate(SCHEDULES)} | SCHEDULE_INDEX,
    "recompute": RECOMPUTE_INDEX,
}
"""Values with names, as a configuration writes them."""
_BOUNDS = {"sp": (0, 1), "stage": (0, 3), "offload": (0, 1)}
_MOST_DIGITS = 9
"""Of a degree or a count; arrays hold no more."""


@dataclass(frozen=True)
class Excluded:
    """A region of the space that cannot be, with the rule and its numbers."""

    region: str
    rule: str


@dataclass(frozen=True)
class Space:
    """Candidates and what was excluded."""

    layouts: Layouts
    size: int
    excluded: tuple[Excluded, ...]


def parse_fixed(texts: list[str] | tuple[str, ...]) -> dict[str, int]:
    """`tp=4`, `stage=3`, `recompute=full`, `dp_shard=8` to numbers. Raises ConfigError for what is none."""
    found: dict[str, int] = {}
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        name, _, value = (part.strip() for part in text.partition("="))
        key = _OTHER_NAMES.get(name, name)
        if key not in FIXABLE or not value:
            raise ConfigError(
                Problem(text, None, "not a field of a layout with a value", f"use one of {', '.join(FIXABLE)}, for example tp=4")
            )
        words = _WORDS.get(key)
        if words is not None:
            if value not in words:
                raise ConfigError(Problem(name, value, "not a value of it", f"use {', '.join(words)}"))
            number = words[value]
        else:
            if value.lower() in ("true", "false", "yes", "no"):
                value = str(int(value.lower() in ("true", "yes")))
            number = int(value) if value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS else -1
            least, most = _BOUNDS.get(key, (1, 10**_MOST_DIGITS - 1))
            if not least <= number <= most:
                raise ConfigError(Problem(name, value, f"not a whole number from {least} to {most}", "write for example tp=4"))
        if found.get(key, number) != number:
            raise ConfigError(Problem(name, value, "is asked for a second time, with another value", "keep one of them"))
        found[key] = number
    return found


def written(fixed: Mapping[str, int]) -> str:
    """What `parse_fixed` reads, as a user writes it."""
    words = {key: {value: name for name, value in table.items()} for key, table in _WORDS.items()}
    return ", ".join(f"{key}={words.get(key, {}).get(value, value)}" for key, value in fixed.items())


def divisors(count: int) -> list[int]:
    """All, ascending."""
    small = [d for d in range(1, int(count**0.5) + 1) if count % d == 0]
    return sorted({*small, *(count // d for d in small)})


def build_space(
    model: Architecture, cluster: Cluster, *, global_batch: int, offers: Offers, split: Split, fixed: Mapping[str, int] | None = None
) -> Space:
    """Every candidate that the rules allow. Raises ConfigError where there is none, with every rule that excluded some."""
    fixed = fixed or {}
    excluded: dict[str, Excluded] = {}
    columns: dict[str, list[Any]] = {f.name: [] for f in fields(Layouts)}
    world = cluster.devices
    for tp in _tensor_degrees(model, cluster, split, fixed, excluded):
        for pp in _stages(model, world // tp, offers, fixed, excluded):
            refusal = offers.refusal(tp=tp, pp=pp)
            if refusal is not None:
                _note(excluded, f"tp = {tp}" if pp == 1 else f"tp = {tp} with pp = {pp}", refusal)
                continue
            _add(columns, model, cluster, tp, pp, global_batch, offers, split, fixed, excluded)
    if not columns["tp"]:
        problems = [Problem(e.region, None, e.rule, "change it, or let the search choose") for e in excluded.values()]
        raise ConfigError(*(problems or [Problem("layout", None, "no candidate is left", "fix fewer values")]))
    layouts = Layouts(**{name: np.concatenate(parts) for name, parts in columns.items()})
    return Space(layouts, len(layouts.tp), tuple(excluded.values()))


def _note(excluded: dict[str, Excluded], region: str, rule: str) -> None:
    excluded.setdefault(region, Excluded(region, rule))


def _tensor_degrees(
    model: Architecture, cluster: Cluster, split: Split, fixed: Mapping[str, int], excluded: dict[str, Excluded]
) -> list[int]:
    widest = min(cluster.devices, max(int(cluster.device.domain), int(cluster.device.devices_per_node)))
    wanted = [fixed["tp"]] if "tp" in fixed else [2**k for k in range(11) if 2**k <= min(widest, 64)]
    found = []
    for tp in wanted:
        region = f"tp = {tp}"
        if cluster.devices % tp:
            _note(excluded, region, f"{cluster.devices} devices and {cluster.devices} % {tp} = {cluster.devices % tp}")
        elif tp > 1 and split.tensor:
            _note(excluded, "tp > 1" if "tp" not in fixed else region, split.tensor)
        elif tp > 1 and model.heads % tp and not split.whole_attention:
            works = ", ".join(str(d) for d in divisors(int(model.heads)) if d <= widest and cluster.devices % d == 0)
            _note(excluded, region, f"num_attention_heads is {model.heads} and {model.heads} % {tp} = {model.heads % tp}; use {works}")
        elif model.kv_heads % tp and tp % model.kv_heads and not split.whole_attention:
            _note(excluded, region, f"num_key_value_heads is {model.kv_heads}, which neither divides {tp} nor is divided by it")
        else:
            found.append(tp)
    return found


def _stages(model: Architecture, ranks: int, offers: Offers, fixed: Mapping[str, int], excluded: dict[str, Excluded]) -> list[int]:
    if not offers.pipeline:
        rule = offers.refusal(tp=1, pp=2) or "this version runs no pipeline"
        if fixed.get("pp", 1) > 1:
            _note(excluded, f"pp = {fixed['pp']}", rule)
            return []
        _note(excluded, "pp > 1", rule)
        return [1]
    found = []
    for pp in [fixed["pp"]] if "pp" in fixed else divisors(ranks):
        if pp > model.layers:
            if "pp" in fixed:
                _note(excluded, f"pp = {pp}", f"a stage has at least one layer, and the model has {model.layers}")
        elif ranks % pp:
            _note(excluded, f"pp = {pp}", f"{ranks} devices are left for it and {ranks} % {pp} = {ranks % pp}")
        else:
            found.append(pp)
    return found


def _schedules(model: Architecture, pp: int, offers: Offers, fixed: Mapping[str, int]) -> list[tuple[int, int]]:
    """(schedule, chunks of a stage)."""
    if pp == 1:
        return [(SCHEDULES.index("none"), 1)]
    found = []
    for name in offers.schedules:
        if name in ("interleaved", "interleaved-zb"):
            # With embedding and head for a layer each, Megatron-LM has stages without a layer; here every stage has one.
            most = model.layers + 2 if offers.compiled is None else model.layers
            chunks = [
                v
                for v in range(2, _MOST_CHUNKS + 1)
                if pp * v <= most and (model.layers % (pp * v) == 0 or (model.layers + 2) % (pp * v) == 0)
            ]
        elif name in ("zbv", "dualpipev"):
            chunks = [2] if pp * 2 <= model.layers else []
        else:
            chunks = [1]
        found += [(SCHEDULES.index(name), v) for v in chunks]
    return [(schedule, v) for schedule, v in found if fixed.get("schedule", schedule) == schedule and fixed.get("vpp", v) == v]


def _shards(dp: int, fixed: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """(stage, dp_replicate, dp_shard)."""
    found = [(0, dp, 1)]
    inner = [d for d in divisors(dp) if d > 1 and (d == dp or d & (d - 1) == 0)]
    found += [(stage, dp // d, d) for stage in (1, 2, 3) for d in inner]
    if "dp_shard" in fixed and dp % fixed["dp_shard"] == 0 and fixed["dp_shard"] not in (1, *inner):
        found += [(stage, dp // fixed["dp_shard"], fixed["dp_shard"]) for stage in (1, 2, 3)]
    names = ("stage", "dp_replicate", "dp_shard")
    return [entry for entry in found if all(fixed.get(name, value) == value for name, value in zip(names, entry, strict=True))]


def _add(
    columns: dict[str, list[Any]],
    model: Architecture,
    cluster: Cluster,
    tp: int,
    pp: int,
    global_batch: int,
    offers: Offers,
    split: Split,
    fixed: Mapping[str, int],
    excluded: dict[str, Excluded],
) -> None:
    dp = cluster.devices // (tp * pp)
    if global_batch % dp:
        below, above = global_batch // dp * dp, (global_batch // dp + 1) * dp
        working = f"{below} or {above}" if below else f"{above}"
        _note(
            excluded,
            f"tp x pp = {tp * pp}",
            f"a batch of {global_batch} over {dp} data-parallel ranks: {global_batch} % {dp} = {global_batch % dp}; use {working}",
        )
        return
    per_rank = global_batch // dp
    micros = [fixed["micro_batch"]] if "micro_batch" in fixed else [b for b in MICRO_BATCHES if b <= per_rank and per_rank % b == 0]
    micros = [b for b in micros if per_rank % b == 0 and fixed.get("accumulation", per_rank // b) == per_rank // b]
    if not micros:
        _note(excluded, f"micro_batch = {fixed.get('micro_batch', 'any')} with dp = {dp}", f"a rank's {per_rank} samples do not divide so")
        return
    enough = [b for b in micros if per_rank // b >= pp]
    if not enough:
        _note(excluded, f"pp = {pp} with dp = {dp}", f"a rank has {per_rank} samples, fewer micro-batches than the {pp} stages")
        return
    if tp > 1 and split.sequence:
        _note(excluded, "sp", split.sequence)
    sequence = [value for value in ((0, 1) if tp > 1 and not split.sequence else (0,)) if fixed.get("sp", value) == value]
    recompute = [RECOMPUTE.index(name) for name in offers.recompute]
    recompute = [kind for kind in recompute if fixed.get("recompute", kind) == kind]
    on_host = offers.offload and int(cluster.device.family) != FAMILIES.index("cpu")  # a CPU's memory is the host's already
    offload = [value for value in ((0, 1) if on_host else (0,)) if fixed.get("offload", value) == value]
    schedules, shards = _schedules(model, pp, offers, fixed), _shards(dp, fixed)
    if not (schedules and shards and sequence and recompute and offload):
        return
    axes = [np.arange(len(schedules)), np.arange(len(shards)), sequence, recompute, offload, enough]
    mesh: list[Any] = list(np.meshgrid(*axes, indexing="ij"))
    grid = [part.ravel() for part in mesh]
    schedule, chunk = (np.array(x)[grid[0]] for x in zip(*schedules, strict=True))
    stage, replicate, shard = (np.array(x)[grid[1]] for x in zip(*shards, strict=True))
    count = len(grid[0])
    values = {
        "pp": np.full(count, pp),
        "schedule": schedule,
        "vpp": chunk,
        "tp": np.full(count, tp),
        "sp": grid[2],
        "cp": np.ones(count, int),
        "ep": np.ones(count, int),
        "dp_replicate": replicate,
        "dp_shard": shard,
        "stage": stage,
        "recompute": grid[3],
        "recompute_share": np.ones(count),
        "offload": grid[4],
        "offload_activations": np.zeros(count),
        "micro_batch": grid[5],
        "accumulation": per_rank // grid[5],
    }
    keep = _runnable(values, pp, offers)
    for name, value in values.items():
        columns[name].append(np.asarray(value)[keep])


def _runnable(values: Mapping[str, Any], pp: int, offers: Offers) -> Any:
    """Which candidates have a schedule that exists for their micro-batches and works with their ZeRO stage, and states that are sharded
    where they are on the host."""
    sharded = (np.asarray(values["offload"]) == 0) | (np.asarray(values["stage"]) > 0)
    if pp == 1:
        return sharded
    third, again = np.asarray(values["stage"]) == 3, np.asarray(values["recompute"]) > 0
    fields_of = np.stack([values["schedule"], values["vpp"], values["accumulation"], third, again], axis=1)
    kinds, inverse = np.unique(fields_of, axis=0, return_inverse=True)
    works = [
        offers.runs(SCHEDULES[int(schedule)], pp=pp, micro_batches=int(m), chunks=int(v), zero=3 if third else 0, recompute=bool(again))
        for schedule, v, m, third, again in kinds
    ]
    return sharded & np.array(works, dtype=bool)[inverse.ravel()]
