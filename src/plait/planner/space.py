"""Candidate layouts of a model on a cluster, and the layouts that rules exclude.

The rules are those of the engine: tp divides the heads, every rank gets complete micro-batches, and
a pipeline has at least one layer per stage and as many micro-batches as stages. Layouts that do not
fit into memory are dropped later (`plait.planner.search`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import ConfigError, Problem
from plait.planner.architecture import Architecture
from plait.planner.hardware import Cluster
from plait.planner.job import CONTEXT, SCHEDULES, Layouts
from plait.planner.request import Request
from plait.planner.techniques import (
    AvailableTechniques,
    MemoryOption,
    MemoryOptions,
    Split,
    format_fixed,
    memory_options,
    splits_backward,
    supports_options,
    with_options,
)

_MAX_MICRO_BATCH = 64
_MAX_CHUNKS = 8
_MAX_TP = _MAX_CP = 64
_RUN_TOGETHER = ("schedule", "vpp", "accumulation", "stage", "ep", "recompute", "offload")
LONG_SEQUENCE = 16_384
"""Tokens per sample from which context parallelism is proposed.

Shorter sequences use data parallelism, which communicates less.
"""


@dataclass(frozen=True)
class Excluded:
    """Group of layouts that cannot run, such as "tp = 3", and the rule that excludes the group."""

    region: str
    rule: str


@dataclass(frozen=True)
class Space:
    """Candidate layouts of a request, and the layouts that rules exclude."""

    layouts: Layouts
    number: NDArray[np.int64]
    """Index of each candidate's layout.

    Candidates that differ only in their memory-saving options have the same layout.
    """
    options: MemoryOptions
    excluded: tuple[Excluded, ...]

    @property
    def size(self) -> int:
        """Number of candidates."""
        return len(self.number)

    def proposed(self, fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return a mask of the candidates that may be proposed.

        A candidate with the optimizer on the host is proposed only if its layout does not fit with
        the optimizer on the device.
        """
        on_host = np.asarray(self.layouts.offload) > 0
        return ~on_host | ~self._of_layouts(fits & ~on_host)

    def _of_layouts(self, which: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return a mask of the candidates that share their layout with a candidate in `which`."""
        return np.bincount(self.number, weights=which)[self.number] > 0

    def between(
        self, seconds: NDArray[np.float64], fits: NDArray[np.bool_], *, within: float = 1.3
    ) -> Layouts | None:
        """Return candidates with some, but not all, memory-saving options.

        See Note [Memory-saving options] in `plait.planner.techniques`.

        Args:
            seconds: Predicted seconds of the candidates of this space.
            fits: Mask of the candidates of this space that fit into memory.
            within: Layouts that are slower than the fastest fitting candidate by more than this
                factor, even without memory-saving options, are left out.

        Returns:
            Candidates of the layouts that fit with memory-saving options but not without. None if
            there are none.
        """
        if not fits.any():
            return None
        on_host = (np.asarray(self.layouts.offload) > 0) & bool(self.options.on_host)

        # The first candidate of each layout has no options.
        is_lightest = np.concatenate([[True], np.diff(self.number) != 0])
        # A layout that is slow even without options would only become slower with them.
        is_candidate = is_lightest & ~fits & (seconds <= within * seconds[fits].min())
        fits_on_device = self._of_layouts(fits & ~on_host)
        fits_on_host = self._of_layouts(fits & on_host)
        layouts = []
        for selected, options in (
            (is_candidate & fits_on_device, self.options.between(on_host=False)),
            (is_candidate & ~fits_on_device & fits_on_host, self.options.between(on_host=True)),
        ):
            if selected.any() and options:
                base = self.layouts.take(np.flatnonzero(selected))
                layouts.append(with_options(base, options))
        return joined(layouts) if layouts else None


def joined(parts: Sequence[Layouts]) -> Layouts:
    """Concatenate the arrays of several sets of candidates."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Layouts(*map(np.concatenate, columns))


def divisors(count: int) -> list[int]:
    """Return all divisors of a number in ascending order."""
    small = [d for d in range(1, int(count**0.5) + 1) if count % d == 0]
    return sorted({*small, *(count // d for d in small)})


def space_of(request: Request, fixed: Mapping[str, int] | None = None) -> Space:
    """Return all candidates of a request that the rules allow.

    Args:
        request: Model, cluster and batch.
        fixed: Fields of the layout with fixed values (`techniques.parse_fixed`).

    Raises:
        ConfigError: No candidate is left. The error lists all rules that excluded candidates.
    """
    fixed = fixed or {}
    cluster = request.cluster
    techniques = request.techniques
    builder = _SpaceBuilder(
        request.model.architecture,
        cluster,
        request.global_batch,
        request.sequence,
        techniques,
        request.split,
        fixed,
        memory_options(techniques, cluster.device, fixed),
    )
    for tp in _tensor_degrees(builder):
        for pp in _stages(builder, cluster.devices // tp):
            refusal = techniques.refusal(tp=tp, pp=pp)
            if refusal is not None:
                region = f"tp = {tp}" if pp == 1 else f"tp = {tp} with pp = {pp}"
                builder.exclude(region, refusal)
                continue
            for cp in _context_degrees(builder, tp, cluster.devices // (tp * pp)):
                _add(builder, tp, pp, cp)

    if not any(len(part) for part in builder.columns["tp"]):
        problems = [
            Problem(region, None, rule, "change it, or let the search choose")
            for region, rule in builder.excluded.items()
        ]
        none_left = Problem("layout", None, "no candidate is left", "fix fewer values")
        raise ConfigError(*(problems or [none_left]))

    return Space(
        Layouts(**{name: np.concatenate(parts) for name, parts in builder.columns.items()}),
        np.concatenate(builder.numbers),
        builder.options,
        tuple(Excluded(region, rule) for region, rule in builder.excluded.items()),
    )


@dataclass(frozen=True)
class _SpaceBuilder:
    """Inputs of `space_of`, and the candidates and exclusions that it has collected so far."""

    model: Architecture
    cluster: Cluster
    global_batch: int
    sequence: int
    techniques: AvailableTechniques
    split: Split
    fixed: Mapping[str, int]
    options: MemoryOptions
    excluded: dict[str, str] = field(default_factory=dict)
    """First rule per excluded region."""
    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {f.name: [] for f in fields(Layouts)}
    )
    numbers: list[NDArray[np.int64]] = field(default_factory=list)

    def allowed(self, names: tuple[str, ...], rows: Iterable[tuple[int, ...]]) -> list[Any]:
        """Return the rows (one value per field of `names`) that agree with the fixed values."""

        def agrees(row: tuple[int, ...]) -> bool:
            values = zip(names, row, strict=True)
            return all(self.fixed.get(name, value) == value for name, value in values)

        return list(filter(agrees, rows))

    def exclude(self, region: str, rule: str) -> None:
        """Record the rule that excludes a region, unless the region already has a rule."""
        self.excluded.setdefault(region, rule)

    def exclude_fixed(self, names: Iterable[str], rule: str) -> None:
        """Record the rule that excludes the values to which the user fixed the fields `names`."""
        fixed = {name: self.fixed[name] for name in names if name in self.fixed}
        if fixed:
            self.exclude(format_fixed(fixed), rule)

    def without_refused(
        self, degrees: Iterable[int], refuse: Callable[[int], Excluded | None]
    ) -> list[int]:
        """Return the degrees that no rule excludes, and record why the other ones are excluded."""
        allowed = []
        for degree in degrees:
            refusal = refuse(degree)
            if refusal is None:
                allowed.append(degree)
            else:
                self.exclude(refusal.region, refusal.rule)
        return allowed


def _rule_of(model: Architecture, names: Sequence[str]) -> str:
    """Return the rule that excludes the fixed values of the fields `names`."""
    if "ep" in names and not model.experts:
        return f"{model.name} has no experts"
    rules = {
        "ep": "ep must divide the experts of a layer, and the ranks that are left for them",
        "sp": "sequence parallelism needs tp of at least 2",
        "dp_shard": (
            "dp_replicate x dp_shard must be the devices / (tp x pp x cp), and dp_shard must be 1"
            " with stage 0"
        ),
    }

    return next(
        (rules[name] for name in names if name in rules),
        "for some tp, pp and cp these values are impossible",
    )


def _tensor_degrees(builder: _SpaceBuilder) -> list[int]:
    device = builder.cluster.device
    domain = max(int(device.domain), int(device.devices_per_node))
    proposed = [tp for tp in divisors(builder.cluster.devices) if tp <= min(domain, _MAX_TP)]
    if "tp" in builder.fixed:
        proposed = [builder.fixed["tp"]]
    return builder.without_refused(proposed, lambda tp: _refuse_tensor_degree(builder, tp, domain))


def _refuse_tensor_degree(builder: _SpaceBuilder, tp: int, domain: int) -> Excluded | None:
    """Return why a degree of tensor parallelism is excluded, or None if it is allowed."""
    model = builder.model
    devices = builder.cluster.devices
    split = builder.split
    region = f"tp = {tp}"
    if devices % tp:
        return Excluded(region, f"{devices} devices and {devices} % {tp} = {devices % tp}")
    if tp > 1 and split.tensor:
        return Excluded(region if "tp" in builder.fixed else "tp > 1", split.tensor)
    if domain % tp and tp % domain and devices > domain:
        return Excluded(
            region,
            f"{domain} devices have fast links to each other, and a group of {tp} would lie in two"
            " such domains",
        )
    if split.replicates_attention:
        # Every rank computes all heads.
        return None

    if tp > 1 and model.heads % tp:
        heads = int(model.heads)
        works = []
        for degree in divisors(heads):
            # Other rules refuse some of the degrees that divide the heads.
            if degree <= domain and not _refuse_tensor_degree(builder, degree, domain):
                works.append(degree)
        return Excluded(
            region,
            f"num_attention_heads is {model.heads} and {model.heads} % {tp} = {model.heads % tp};"
            f" use {', '.join(map(str, works))}",
        )
    if model.kv_heads % tp and tp % model.kv_heads:
        return Excluded(
            region,
            f"num_key_value_heads is {model.kv_heads}, which neither divides {tp} nor is divided by"
            " it",
        )
    return None


def _stages(builder: _SpaceBuilder, ranks: int) -> list[int]:
    fixed = builder.fixed
    rule = builder.techniques.refusal(tp=1, pp=2)
    if rule is not None:
        if fixed.get("pp", 1) > 1:
            builder.exclude(f"pp = {fixed['pp']}", rule)
            return []
        builder.exclude("pp > 1", rule)
        return [1]

    proposed = [fixed["pp"]] if "pp" in fixed else divisors(ranks)
    if "pp" not in fixed and not builder.split.pipeline:
        # More stages than layers are obviously impossible, not worth a note.
        proposed = [pp for pp in proposed if pp <= builder.model.layers]
    return builder.without_refused(proposed, lambda pp: _refuse_stages(builder, pp, ranks))


def _refuse_stages(builder: _SpaceBuilder, pp: int, ranks: int) -> Excluded | None:
    """Return why a number of pipeline stages is excluded, or None if it is allowed."""
    fixed = builder.fixed
    layers = builder.model.layers
    region = f"pp = {pp}"
    # Fixed fields that only a pipeline has.
    staged = {}
    if fixed.get("schedule", SCHEDULES.index("none")) != SCHEDULES.index("none"):
        staged["schedule"] = fixed["schedule"]
    if fixed.get("vpp", 1) != 1:
        staged["vpp"] = fixed["vpp"]

    if pp == 1 and staged:
        return Excluded(
            region, f"{format_fixed(staged)} needs a pipeline, which has at least 2 stages"
        )
    if pp > 1 and builder.split.pipeline:
        return Excluded(region if "pp" in fixed else "pp > 1", builder.split.pipeline)
    if pp > layers:
        return Excluded(region, f"a stage has at least one layer, and the model has {layers}")
    if ranks % pp:
        return Excluded(
            region, f"{ranks} devices are left for it and {ranks} % {pp} = {ranks % pp}"
        )
    return None


def _schedules(builder: _SpaceBuilder, pp: int) -> list[tuple[int, int]]:
    """Return the allowed pipeline schedules as (schedule, chunks per rank)."""
    layers = builder.model.layers
    if pp == 1:
        return [(SCHEDULES.index("none"), 1)]
    schedules = []
    for name in builder.techniques.schedules:
        if name in ("interleaved", "interleaved-zb"):
            # As in Megatron-LM, embedding and head may count as a layer each. Unlike there, every
            # stage has at least one real layer.
            chunks = []
            for count in range(2, _MAX_CHUNKS + 1):
                stages = pp * count
                if stages <= layers and (layers % stages == 0 or (layers + 2) % stages == 0):
                    chunks.append(count)
        elif name in ("zbv", "dualpipev"):
            chunks = [2] if pp * 2 <= layers else []
        else:
            chunks = [1]
        schedules += [(SCHEDULES.index(name), count) for count in chunks]

    return builder.allowed(("schedule", "vpp"), schedules)


def _shards(builder: _SpaceBuilder, dp: int) -> list[tuple[int, int, int]]:
    """Return the allowed divisions of `dp` ranks as (ZeRO stage, dp_replicate, dp_shard)."""
    fixed = builder.fixed
    entries = [(0, dp, 1)]
    if builder.cluster.devices == 1 or (dp == 1 and fixed.get("stage")):
        # A sharded stage with a single shard: on one device, because stage 0 does not support the
        # optimizer on the host, and if the stage is fixed.
        entries.append((fixed.get("stage") or 1, 1, 1))
    # Only all ranks or a power of two are proposed, but any divisor can be fixed.
    inner = []
    for degree in divisors(dp):
        is_power_of_two = degree & (degree - 1) == 0
        if degree > 1 and (degree in (dp, fixed.get("dp_shard")) or is_power_of_two):
            inner.append(degree)
    for stage in (1, 2, 3):
        entries += [(stage, dp // dp_shard, dp_shard) for dp_shard in inner]
    return builder.allowed(("stage", "dp_replicate", "dp_shard"), entries)


def _context_degrees(builder: _SpaceBuilder, tp: int, ranks: int) -> list[int]:
    degrees = _degrees_of_context(builder, tp, ranks)
    if "context" not in builder.fixed or builder.fixed.get("cp", 1) > 1:
        return degrees
    kind = format_fixed({"context": builder.fixed["context"]})
    builder.exclude(
        "cp = 1",
        f"{kind} needs cp of at least 2, which is only proposed for parts of at least"
        f" {LONG_SEQUENCE // 8:,} tokens; fix cp as well for shorter parts",
    )
    return [cp for cp in degrees if cp > 1]


def _degrees_of_context(builder: _SpaceBuilder, tp: int, ranks: int) -> list[int]:
    fixed = builder.fixed
    rule = None
    if fixed.get("cp", 2) > 1:
        rule = builder.split.context
    if builder.techniques.compiled:
        rule = rule or "context parallelism is not tested with torch.compile"
    if rule:
        builder.exclude("cp > 1", rule)
        return [] if fixed.get("cp", 1) > 1 else [1]
    if "cp" not in fixed:
        if builder.sequence < LONG_SEQUENCE and "context" not in fixed:
            return [1]
        degrees = []
        for degree in divisors(ranks):
            is_power_of_two = degree & (degree - 1) == 0
            is_long = builder.sequence // degree >= LONG_SEQUENCE // 8
            if degree <= _MAX_CP and is_power_of_two and is_long:
                degrees.append(degree)
        return degrees

    cp = fixed["cp"]
    if ranks % cp:
        builder.exclude(
            f"cp = {cp} with tp = {tp}",
            f"{ranks} devices are left for it and {ranks} % {cp} = {ranks % cp}",
        )
        return []

    return [cp]


def _contexts(builder: _SpaceBuilder, tp: int, cp: int) -> list[int]:
    """Return the allowed algorithms of context parallelism as indices into CONTEXT."""
    if cp == 1:
        return [0]
    attention_tp = 1 if builder.split.replicates_attention else tp
    heads = max(int(builder.model.heads) // attention_tp, 1)
    kv = max(int(builder.model.kv_heads) // attention_tp, 1)
    if "context" in builder.fixed:
        if CONTEXT[builder.fixed["context"]] == "ulysses" and heads % cp:
            builder.exclude(
                f"ulysses with tp = {tp} and cp = {cp}",
                f"a rank of tp has {heads} heads and {heads} % {cp} = {heads % cp}",
            )
            return []
        return [builder.fixed["context"]]

    # A ring waits only for the last gradients of keys and values, ulysses for all of its traffic.
    # all-gather-kv waits three times for keys and values, and needs memory for those of all ranks.
    fewer = heads % cp == 0 and heads + lcm(kv, cp) < kv * cp
    return [CONTEXT.index("ulysses" if fewer else "ring")]


def _expert_degrees(builder: _SpaceBuilder, tp: int, ranks: int) -> list[int]:
    """Return the allowed degrees of expert parallelism for a pipeline stage of `ranks` ranks."""
    experts = int(builder.model.experts)
    degrees = [1]
    if experts and not builder.techniques.compiled:
        degrees = [d for d in divisors(experts) if ranks % d == 0]
    if tp > 1 and builder.split.with_experts:
        builder.exclude(
            "tp > 1 with ep < tp",
            "every rank of tp would compute all tokens of its experts",
        )
        degrees = [d for d in degrees if d % tp == 0]
    return degrees


def _micro_batches(builder: _SpaceBuilder, tp: int, pp: int, cp: int) -> list[int]:
    """Return the micro-batch sizes that these degrees allow.

    If no size is allowed, the reason is added to the exclusions of `builder`.
    """
    fixed = builder.fixed
    dp = builder.cluster.devices // (tp * pp * cp)
    batch = builder.global_batch
    if batch % dp:
        below = batch // dp * dp
        above = (batch // dp + 1) * dp
        working = f"{below} or {above}" if below else f"{above}"
        region = f"tp x pp = {tp * pp}"
        if cp > 1:
            region = f"tp x pp x cp = {tp * pp * cp}"
        builder.exclude(
            region,
            f"a batch of {batch} over {dp} data-parallel ranks: {batch} % {dp} = {batch % dp}; use"
            f" {working}",
        )
        return []

    per_rank = batch // dp
    sizes = [size for size in divisors(per_rank) if size <= _MAX_MICRO_BATCH]
    if "micro_batch" in fixed:
        sizes = [fixed["micro_batch"]]
    micro_batches = []
    for size in sizes:
        accumulation = per_rank // size
        if per_rank % size == 0 and fixed.get("accumulation", accumulation) == accumulation:
            micro_batches.append(size)
    if not micro_batches:
        fixed_sizes = " x ".join(
            f"{name} = {fixed[name]}" for name in ("micro_batch", "accumulation") if name in fixed
        )
        builder.exclude(
            f"{fixed_sizes} with dp = {dp}",
            f"a rank's {per_rank} samples cannot be divided in this way",
        )
        return []

    enough = [size for size in micro_batches if per_rank // size >= pp]
    if not enough:
        most = per_rank // min(micro_batches)
        builder.exclude(
            f"pp = {pp} with dp = {dp}",
            f"a rank's {per_rank} samples are at most {most} micro-batches, but {pp} stages need"
            f" {pp}",
        )
        return []
    return enough


def _as_rows(values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Wrap each value in a tuple of length 1."""
    return [(value,) for value in values]


def _add(builder: _SpaceBuilder, tp: int, pp: int, cp: int) -> None:
    """Add all candidates with these degrees."""
    dp = builder.cluster.devices // (tp * pp * cp)
    micro_batches = _micro_batches(builder, tp, pp, cp)
    if not micro_batches:
        return

    if tp > 1 and builder.split.sequence:
        builder.exclude("sp", builder.split.sequence)
    sequence = [0, 1] if tp > 1 and not builder.split.sequence else [0]
    ends = builder.options.ends
    lists: dict[tuple[str, ...], list[tuple[Any, ...]]] = {
        ("schedule", "vpp"): _schedules(builder, pp),
        ("stage", "dp_replicate", "dp_shard"): _shards(builder, dp),
        ("sp",): builder.allowed(("sp",), _as_rows(sequence)),
        ("context",): _as_rows(_contexts(builder, tp, cp)),
        ("ep",): builder.allowed(("ep",), _as_rows(_expert_degrees(builder, tp, dp * cp * tp))),
        ("micro_batch",): _as_rows(micro_batches),
        tuple(f.name for f in fields(MemoryOption)): [
            tuple(vars(option).values()) for option in ends
        ],
    }
    for names, entries in lists.items():
        if not entries:
            builder.exclude_fixed(names, _rule_of(builder.model, names))
    if not all(lists.values()):
        return
    grid = np.meshgrid(*(np.arange(len(entries)) for entries in lists.values()), indexing="ij")
    count = grid[0].size
    values: dict[str, Any] = {
        "pp": np.full(count, pp),
        "tp": np.full(count, tp),
        "cp": np.full(count, cp),
        "offload_activations": np.zeros(count),
    }
    for (names, entries), index in zip(lists.items(), grid, strict=True):
        for name, column in zip(names, zip(*entries, strict=True), strict=True):
            values[name] = np.array(column)[index.ravel()]
    values["accumulation"] = builder.global_batch // dp // values["micro_batch"]
    keep = _runnable(builder, values, pp)
    if not keep.any():
        builder.exclude_fixed(
            _RUN_TOGETHER,
            "for some tp, pp and cp no schedule runs with these values",
        )

    for name, value in values.items():
        builder.columns[name].append(value[keep])
    before = max((int(part[-1]) + 1 for part in builder.numbers if len(part)), default=0)
    builder.numbers.append(before + np.arange(count)[keep] // len(ends))


def _runnable(builder: _SpaceBuilder, values: Mapping[str, Any], pp: int) -> Any:
    """Return a mask of the candidates that can run.

    The schedule must exist for the number of micro-batches and support the ZeRO stage. Experts must
    be sharded in a way that `parallel.techniques.experts` supports. The layout must support its
    memory-saving options.
    """
    stage = values["stage"]

    # Tokens of experts can only be exchanged in unsplit backwards.
    unsplit = ~splits_backward(values["schedule"])
    keep = (values["ep"] == 1) | ((stage > 0) & unsplit)
    keep &= supports_options(Layouts(**values))
    # With one shard all stages are the same, except that stage 0 has its optimizer on the device.
    if "stage" not in builder.fixed:
        keep &= (stage == 0) | (values["dp_shard"] > 1) | (values["offload"] > 0)
    if pp == 1:
        return keep
    is_stage_3 = stage == 3
    kinds: dict[tuple[int, ...], bool] = {}
    key = ((values["schedule"] * 1000 + values["vpp"]) * 2 + is_stage_3) * 10**9 + values[
        "accumulation"
    ]

    for kind, index in zip(*np.unique(key, return_index=True), strict=True):
        kinds[kind] = builder.techniques.runs(
            SCHEDULES[int(values["schedule"][index])],
            pp=pp,
            micro_batches=int(values["accumulation"][index]),
            chunks=int(values["vpp"][index]),
            zero=3 if is_stage_3[index] else 0,
        )

    ordered = sorted(kinds)
    return keep & np.array([kinds[kind] for kind in ordered])[np.searchsorted(ordered, key)]
