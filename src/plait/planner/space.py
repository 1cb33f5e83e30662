"""Every candidate layout of a model on a cluster, as arrays; and what was left out, by which rule
and by how much.

Rules are those of the engine: heads divide over tp, every rank gets whole micro-batches, a pipeline
has at least one layer a stage and as many micro-batches as stages. What merely does not fit in
memory is not left out here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import ConfigError, Problem
from plait.planner.architecture import Architecture
from plait.planner.fixed import written
from plait.planner.hardware import Cluster
from plait.planner.job import CONTEXT, SCHEDULES, Layouts
from plait.planner.offers import Offers
from plait.planner.relief import Relief, Reliefs, reliefs_of, relieved, relieves, splits_backward
from plait.planner.splits import Split

_MOST_MICRO_BATCH = 64
_MOST_CHUNKS = 8
_MOST_TP = _MOST_CP = 64
_RUN_TOGETHER = ("schedule", "vpp", "accumulation", "stage", "ep", "recompute", "offload")
LONG_SEQUENCE = 16_384
"""Tokens from which on sequences are cut over cp. Shorter ones train with data parallelism, which
sends less.
"""


@dataclass(frozen=True)
class Excluded:
    """A region of the space that cannot be, with the rule and its numbers."""

    region: str
    rule: str


@dataclass(frozen=True)
class Space:
    """Candidates and what was excluded."""

    layouts: Layouts
    number: NDArray[np.int64]
    """Of the layout that a candidate is, whatever its relief."""
    reliefs: Reliefs
    excluded: tuple[Excluded, ...]

    @property
    def size(self) -> int:
        """Candidates."""
        return len(self.number)

    def proposed(self, fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which candidates are: the optimizer on the host where a layout does not fit with it on
        the device.
        """
        on_host = np.asarray(self.layouts.offload) > 0
        return ~on_host | ~self._of_layouts(fits & ~on_host)

    def _of_layouts(self, which: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Of every candidate, whether one of the same layout is among `which`."""
        return (
            np.bincount(self.number, weights=which, minlength=int(self.number.max()) + 1)[
                self.number
            ]
            > 0
        )

    def between(
        self, seconds: NDArray[np.float64], fits: NDArray[np.bool_], *, within: float = 1.3
    ) -> Layouts | None:
        """The other candidates of layouts that fit with relief and not without, and may become
        nearly as fast as the fastest that fits: without relief they take at most `within` times its
        seconds. None where there are none.
        """
        if not fits.any():
            return None
        on_host = (np.asarray(self.layouts.offload) > 0) & bool(self.reliefs.on_host)
        # of a layout's candidates the lightest
        first = np.concatenate([[True], np.diff(self.number) != 0])
        open_ = first & ~fits & (seconds <= within * seconds[fits].min())
        here = self._of_layouts(fits & ~on_host)
        there = self._of_layouts(fits & on_host)
        device, host = (self.reliefs.between(on_host=place) for place in (False, True))
        parts = [(open_ & here, device), (open_ & ~here & there, host)]
        found = [
            relieved(self.layouts.take(np.flatnonzero(chosen)), some)
            for chosen, some in parts
            if chosen.any() and some
        ]
        return joined(found) if found else None


def joined(parts: Sequence[Layouts]) -> Layouts:
    """One after the other."""
    return Layouts(
        **{
            f.name: np.concatenate([getattr(part, f.name) for part in parts])
            for f in fields(Layouts)
        }
    )


def divisors(count: int) -> list[int]:
    """All, ascending."""
    small = [d for d in range(1, int(count**0.5) + 1) if count % d == 0]
    return sorted({*small, *(count // d for d in small)})


def build_space(
    model: Architecture,
    cluster: Cluster,
    *,
    global_batch: int,
    sequence: int,
    offers: Offers,
    split: Split,
    fixed: Mapping[str, int] | None = None,
) -> Space:
    """Every candidate that the rules allow. Raises ConfigError where there is none, with every rule
    that excluded some.
    """
    asked = _Asked(
        model,
        cluster,
        global_batch,
        sequence,
        offers,
        split,
        fixed or {},
        reliefs_of(offers, cluster.device, fixed or {}),
    )
    world = cluster.devices
    excluded = asked.excluded
    columns = asked.columns
    for tp in _tensor_degrees(asked):
        for pp in _stages(asked, world // tp):
            refusal = offers.refusal(tp=tp, pp=pp)
            if refusal is not None:
                _note(excluded, f"tp = {tp}" if pp == 1 else f"tp = {tp} with pp = {pp}", refusal)
                continue
            for cp in _context_degrees(asked, tp, world // (tp * pp)):
                _add(asked, tp, pp, cp)
    if not any(len(part) for part in columns["tp"]):
        problems = [
            Problem(e.region, None, e.rule, "change it, or let the search choose")
            for e in excluded.values()
        ]
        raise ConfigError(
            *(problems or [Problem("layout", None, "no candidate is left", "fix fewer values")])
        )
    layouts = Layouts(**{name: np.concatenate(parts) for name, parts in columns.items()})
    return Space(layouts, np.concatenate(asked.numbers), asked.reliefs, tuple(excluded.values()))


@dataclass(frozen=True)
class _Asked:
    """What a space is built for, and what there is of it so far."""

    model: Architecture
    cluster: Cluster
    global_batch: int
    sequence: int
    offers: Offers
    split: Split
    fixed: Mapping[str, int]
    reliefs: Reliefs
    excluded: dict[str, Excluded] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {f.name: [] for f in fields(Layouts)}
    )
    numbers: list[NDArray[np.int64]] = field(default_factory=list)

    def allowed(self, name: str, values: Iterable[int]) -> list[int]:
        """Of a field's values those that are not fixed to another."""
        return [value for value in values if self.fixed.get(name, value) == value]


def _note(excluded: dict[str, Excluded], region: str, rule: str) -> None:
    excluded.setdefault(region, Excluded(region, rule))


def _note_fixed(asked: _Asked, names: Iterable[str], rule: str) -> None:
    """That nothing is left by what is fixed of some fields."""
    fixed = {name: asked.fixed[name] for name in names if name in asked.fixed}
    if fixed:
        _note(asked.excluded, written(fixed), rule)


def _rule_of(model: Architecture, names: Sequence[str]) -> str:
    """Why none of the values that are fixed of these fields is left."""
    if "ep" in names and not model.experts:
        return f"{model.name} has no experts"
    rules = {
        "ep": "the experts of a layer, and the ranks that are left for them, are a multiple of ep",
        "sp": "it is of tp 2 or more, whose ranks have parts of a sequence each",
        "dp_shard": (
            "dp_replicate x dp_shard is what tp, pp and cp leave of the devices, and with stage 0"
            " nothing is sharded"
        ),
    }
    return next(
        (rules[name] for name in names if name in rules), "not every tp, pp and cp has these values"
    )


def _tensor_degrees(asked: _Asked) -> list[int]:
    model = asked.model
    cluster = asked.cluster
    split = asked.split
    fixed = asked.fixed
    excluded = asked.excluded
    domain = max(int(cluster.device.domain), int(cluster.device.devices_per_node))
    wanted = (
        [fixed["tp"]]
        if "tp" in fixed
        else [tp for tp in divisors(cluster.devices) if tp <= min(domain, _MOST_TP)]
    )
    found = []
    for tp in wanted:
        region = f"tp = {tp}"
        if cluster.devices % tp:
            _note(
                excluded,
                region,
                f"{cluster.devices} devices and {cluster.devices} % {tp} = {cluster.devices % tp}",
            )
        elif tp > 1 and split.tensor:
            _note(excluded, "tp > 1" if "tp" not in fixed else region, split.tensor)
        elif domain % tp and tp % domain and cluster.devices > domain:
            _note(
                excluded,
                region,
                f"{domain} devices have fast links to each other, and a group of {tp} would lie in"
                " two such domains",
            )
        elif tp > 1 and model.heads % tp and not split.whole_attention:
            works = ", ".join(
                str(d)
                for d in divisors(int(model.heads))
                if d <= domain and cluster.devices % d == 0
            )
            _note(
                excluded,
                region,
                f"num_attention_heads is {model.heads} and {model.heads} % {tp} ="
                f" {model.heads % tp}; use {works}",
            )
        elif model.kv_heads % tp and tp % model.kv_heads and not split.whole_attention:
            _note(
                excluded,
                region,
                f"num_key_value_heads is {model.kv_heads}, which neither divides {tp} nor is"
                " divided by it",
            )
        else:
            found.append(tp)
    return found


def _stages(asked: _Asked, ranks: int) -> list[int]:
    model = asked.model
    offers = asked.offers
    fixed = asked.fixed
    excluded = asked.excluded
    if not offers.pipeline:
        rule = offers.refusal(tp=1, pp=2) or "this version runs no pipeline"
        if fixed.get("pp", 1) > 1:
            _note(excluded, f"pp = {fixed['pp']}", rule)
            return []
        _note(excluded, "pp > 1", rule)
        return [1]
    found = []
    staged = {
        name: fixed[name]
        for name, alone in (("schedule", SCHEDULES.index("none")), ("vpp", 1))
        if fixed.get(name, alone) != alone
    }
    for pp in [fixed["pp"]] if "pp" in fixed else divisors(ranks):
        if pp == 1 and staged:
            _note(
                excluded,
                "pp = 1",
                f"{written(staged)} is of a pipeline, which has 2 stages or more",
            )
        elif pp > 1 and asked.split.pipeline:
            _note(excluded, "pp > 1" if "pp" not in fixed else f"pp = {pp}", asked.split.pipeline)
        elif pp > model.layers:
            if "pp" in fixed:
                _note(
                    excluded,
                    f"pp = {pp}",
                    f"a stage has at least one layer, and the model has {model.layers}",
                )
        elif ranks % pp:
            _note(
                excluded,
                f"pp = {pp}",
                f"{ranks} devices are left for it and {ranks} % {pp} = {ranks % pp}",
            )
        else:
            found.append(pp)
    return found


def _schedules(
    model: Architecture, pp: int, offers: Offers, fixed: Mapping[str, int]
) -> list[tuple[int, int]]:
    """(schedule, chunks of a stage)."""
    if pp == 1:
        return [(SCHEDULES.index("none"), 1)]
    found = []
    for name in offers.schedules:
        if name in ("interleaved", "interleaved-zb"):
            # With embedding and head for a layer each, Megatron-LM has stages without a layer; here
            # every stage has one.
            most = model.layers + 2 if offers.compiled is None else model.layers
            chunks = [
                v
                for v in range(2, _MOST_CHUNKS + 1)
                if pp * v <= most
                and (model.layers % (pp * v) == 0 or (model.layers + 2) % (pp * v) == 0)
            ]
        elif name in ("zbv", "dualpipev"):
            chunks = [2] if pp * 2 <= model.layers else []
        else:
            chunks = [1]
        found += [(SCHEDULES.index(name), v) for v in chunks]
    return [
        (schedule, v)
        for schedule, v in found
        if fixed.get("schedule", schedule) == schedule and fixed.get("vpp", v) == v
    ]


def _shards(dp: int, fixed: Mapping[str, int], *, alone: bool) -> list[tuple[int, int, int]]:
    """(stage, dp_replicate, dp_shard); `alone`: of the only device."""
    found = [(0, dp, 1)]
    if alone or (dp == 1 and fixed.get("stage")):
        # One rank has all of the shards: the only device, because stage 0 has no optimizer on the
        # host; and the stage that is asked for.
        found.append((fixed.get("stage") or 1, 1, 1))
    inner = [d for d in divisors(dp) if d > 1 and (d == dp or d & (d - 1) == 0)]
    found += [(stage, dp // d, d) for stage in (1, 2, 3) for d in inner]
    if "dp_shard" in fixed and dp % fixed["dp_shard"] == 0 and fixed["dp_shard"] not in (1, *inner):
        found += [(stage, dp // fixed["dp_shard"], fixed["dp_shard"]) for stage in (1, 2, 3)]
    names = ("stage", "dp_replicate", "dp_shard")
    return [
        entry
        for entry in found
        if all(fixed.get(name, value) == value for name, value in zip(names, entry, strict=True))
    ]


def _context_degrees(asked: _Asked, tp: int, ranks: int) -> list[int]:
    found = _degrees_of_context(asked, tp, ranks)
    if "context" not in asked.fixed or asked.fixed.get("cp", 1) > 1:
        return found
    kind = written({"context": asked.fixed["context"]})
    rule = (
        f"{kind} is of sequences in 2 parts or more, of at least {LONG_SEQUENCE // 8:,} tokens each"
        " unless cp is given"
    )
    _note(asked.excluded, "cp = 1", rule)
    return [cp for cp in found if cp > 1]


def _degrees_of_context(asked: _Asked, tp: int, ranks: int) -> list[int]:
    fixed = asked.fixed
    split = asked.split
    excluded = asked.excluded
    if fixed.get("cp", 2) > 1 and split.context:
        _note(excluded, "cp > 1", split.context)
        return asked.allowed("cp", [1])
    if asked.offers.compiled:
        _note(excluded, "cp > 1", "parts of sequences are not proven under torch.compile")
        return asked.allowed("cp", [1])
    if "cp" not in fixed:
        if asked.sequence < LONG_SEQUENCE and "context" not in fixed:
            return [1]
        return [
            cp
            for cp in divisors(ranks)
            if cp <= _MOST_CP and cp & (cp - 1) == 0 and asked.sequence // cp >= LONG_SEQUENCE // 8
        ]
    cp = fixed["cp"]
    if ranks % cp:
        _note(
            excluded,
            f"cp = {cp} with tp = {tp}",
            f"{ranks} devices are left for it and {ranks} % {cp} = {ranks % cp}",
        )
        return []
    return [cp]


def _contexts(asked: _Asked, tp: int, cp: int) -> list[int]:
    """Kinds, as indices into CONTEXT."""
    if cp == 1:
        return [0]
    heads, kv = (
        max(int(count) // (1 if asked.split.whole_attention else tp), 1)
        for count in (asked.model.heads, asked.model.kv_heads)
    )
    if "context" in asked.fixed:
        if CONTEXT[asked.fixed["context"]] == "ulysses" and heads % cp:
            rule = f"a rank of tp has {heads} heads and {heads} % {cp} = {heads % cp}"
            _note(asked.excluded, f"ulysses with tp = {tp} and cp = {cp}", rule)
            return []
        return [asked.fixed["context"]]
    # A ring waits only for the last gradients of keys and values, ulysses for all of its traffic.
    # all-gather-kv waits three times for keys and values, and needs memory for those of all ranks.
    fewer = heads % cp == 0 and heads + lcm(kv, cp) < kv * cp
    return [CONTEXT.index("ulysses" if fewer else "ring")]


def _expert_degrees(asked: _Asked, tp: int, ranks: int) -> list[int]:
    """Of a stage of `ranks`."""
    experts = int(asked.model.experts)
    degrees = (
        [d for d in divisors(experts) if ranks % d == 0]
        if experts and not asked.offers.compiled
        else [1]
    )
    if tp > 1 and asked.split.with_experts:
        _note(
            asked.excluded,
            "tp > 1 with ep < tp",
            "every rank of tp would compute all tokens of the experts that it has",
        )
        degrees = [d for d in degrees if d % tp == 0]
    return asked.allowed("ep", degrees)


def _add(asked: _Asked, tp: int, pp: int, cp: int) -> None:
    model = asked.model
    cluster = asked.cluster
    fixed = asked.fixed
    excluded = asked.excluded
    offers = asked.offers
    dp = cluster.devices // (tp * pp * cp)
    batch = asked.global_batch
    if batch % dp:
        below = batch // dp * dp
        above = (batch // dp + 1) * dp
        working = f"{below} or {above}" if below else f"{above}"
        region = f"tp x pp = {tp * pp}" if cp == 1 else f"tp x pp x cp = {tp * pp * cp}"
        _note(
            excluded,
            region,
            f"a batch of {batch} over {dp} data-parallel ranks: {batch} % {dp} = {batch % dp}; use"
            f" {working}",
        )
        return
    per_rank = batch // dp
    micros = (
        [fixed["micro_batch"]]
        if "micro_batch" in fixed
        else [b for b in divisors(per_rank) if b <= _MOST_MICRO_BATCH]
    )
    micros = [
        b
        for b in micros
        if per_rank % b == 0 and fixed.get("accumulation", per_rank // b) == per_rank // b
    ]
    if not micros:
        asks = " x ".join(
            f"{name} = {fixed[name]}" for name in ("micro_batch", "accumulation") if name in fixed
        )
        _note(excluded, f"{asks} with dp = {dp}", f"a rank's {per_rank} samples do not divide so")
        return
    enough = [b for b in micros if per_rank // b >= pp]
    if not enough:
        _note(
            excluded,
            f"pp = {pp} with dp = {dp}",
            f"a rank has {per_rank} samples, fewer micro-batches than the {pp} stages",
        )
        return
    if tp > 1 and asked.split.sequence:
        _note(excluded, "sp", asked.split.sequence)
    sequence = asked.allowed("sp", (0, 1) if tp > 1 and not asked.split.sequence else (0,))
    ends = asked.reliefs.ends
    lists: dict[tuple[str, ...], list[tuple[Any, ...]]] = {
        ("schedule", "vpp"): _schedules(model, pp, offers, fixed),
        ("stage", "dp_replicate", "dp_shard"): _shards(dp, fixed, alone=cluster.devices == 1),
        ("sp",): [(value,) for value in sequence],
        ("context",): [(kind,) for kind in _contexts(asked, tp, cp)],
        ("ep",): [(degree,) for degree in _expert_degrees(asked, tp, dp * cp * tp)],
        ("micro_batch",): [(size,) for size in enough],
        tuple(f.name for f in fields(Relief)): [tuple(vars(relief).values()) for relief in ends],
    }
    for names in (names for names, entries in lists.items() if not entries):
        _note_fixed(asked, names, _rule_of(model, names))
    if not all(lists.values()):
        return
    grid = np.meshgrid(*(np.arange(len(entries)) for entries in lists.values()), indexing="ij")
    count = grid[0].size
    values: dict[str, Any] = {
        "pp": np.full(count, pp),
        "tp": np.full(count, tp),
        "cp": np.full(count, cp),
    }
    for (names, entries), index in zip(lists.items(), grid, strict=True):
        for name, column in zip(names, zip(*entries, strict=True), strict=True):
            values[name] = np.array(column)[index.ravel()]
    values |= {
        "offload_activations": np.zeros(count),
        "accumulation": per_rank // values["micro_batch"],
    }
    keep = _runnable(asked, values, pp)
    if not keep.any():
        _note_fixed(
            asked,
            _RUN_TOGETHER,
            "not every tp, pp and cp has a schedule that runs with these values",
        )
    for name, value in values.items():
        asked.columns[name].append(value[keep])
    before = max((int(part[-1]) + 1 for part in asked.numbers if len(part)), default=0)
    asked.numbers.append(before + np.arange(count)[keep] // len(ends))


def _runnable(asked: _Asked, values: Mapping[str, Any], pp: int) -> Any:
    """Which candidates have a schedule that exists for their micro-batches and works with their
    ZeRO stage, experts that are sharded as `experts.expert_parallel` knows, and a relief that goes
    with the rest.
    """
    offers = asked.offers
    stage = values["stage"]
    whole = ~splits_backward(values["schedule"])  # in which tokens can be exchanged
    keep = (values["ep"] == 1) | ((stage > 0) & whole)
    keep &= relieves(Layouts(**values))
    # with one shard all stages are the same, but that stage 0 has its optimizer on the device
    if "stage" not in asked.fixed:
        keep &= (stage == 0) | (values["dp_shard"] > 1) | (values["offload"] > 0)
    if pp == 1:
        return keep
    third = stage == 3
    kinds: dict[tuple[int, ...], bool] = {}
    key = ((values["schedule"] * 1000 + values["vpp"]) * 2 + third) * 10**9 + values["accumulation"]
    for one, index in zip(*np.unique(key, return_index=True), strict=True):
        schedule, chunks, m = (
            int(values[name][index]) for name in ("schedule", "vpp", "accumulation")
        )
        kinds[one] = offers.runs(
            SCHEDULES[schedule],
            pp=pp,
            micro_batches=m,
            chunks=chunks,
            zero=3 if third[index] else 0,
        )
    ordered = sorted(kinds)
    return keep & np.array([kinds[one] for one in ordered])[np.searchsorted(ordered, key)]
