"""Exact bytes of Plait's model states, from the ledger of its techniques.

The ledger computes the bytes of the embedding, of one block and of the head. The bytes of a
pipeline stage are sums of these. Names and shapes of parameters are derived from an Architecture,
so that no model is built. Tests compare them with the parameters of the Transformers model.

The "ends" of a model are its parameters outside the blocks: embedding, positions, norm and head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from math import prod
from typing import Any, cast

import numpy as np

from plait.model.facts import ModelFacts, ParameterFacts
from plait.model.outer_layers import LEAST_SHARE
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.pipeline.estimates import balance_stages
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from plait.planner.architecture import Architecture
from plait.planner.hardware import PRECISIONS, only
from plait.planner.job import SCHEDULES, Job, Layouts
from plait.planner.peak_moments import States, Units
from plait.planner.pipeline import (
    V_SHAPED,
    Holdings,
    holdings,
    in_flight,
    rank_holdings,
    stages_of_rank,
)

_MASTER_BYTES = 4
"""Bytes per element of a parameter, which is float32 unless `model.dtype` differs."""

_EXPERTS = "experts."
"""Prefix of the names of parameters that `ep` splits."""

Split = dict[str, int | None]
Entry = tuple[str, tuple[int, ...], int | None]
"""(name, shape, dimension split over tp) of a parameter."""


def block_parameters(
    model: Architecture, *, experts: bool = False, replicates_keys: bool = False
) -> list[Entry]:
    """Return (name, shape, dimension split over tp) of the parameters of a block.

    Args:
        model: Sizes of the model.
        experts: Whether the block has experts.
        replicates_keys: Whether keys and values are replicated over tp, because there are fewer
            key-value heads than tp ranks.
    """
    if model.model_type == "gpt2":
        return _gpt2_block(model)

    entries = _attention_entries(model, replicates_keys)
    if model.qk_norm:
        entries += [("q_norm", (model.head_dim,), None), ("k_norm", (model.head_dim,), None)]
    entries += _expert_entries(model) if experts else _mlp_entries(model)
    leaves = ("weight", "bias") if model.bias else ("weight",)
    for norm in ("norm1", "norm2"):
        entries += [(f"{norm}.{leaf}", (model.hidden,), None) for leaf in leaves]
    return entries


def _attention_entries(model: Architecture, replicates_keys: bool) -> list[Entry]:
    """Return the parameters of attention's projections."""
    if model.latent_rank:
        return _latent_entries(model)

    entries: list[Entry] = []
    hidden = model.hidden
    # Weights are [out, in]. Queries, keys and values are split by heads, which are rows; the
    # output's weight has them in its columns.
    kv = model.kv_heads * model.head_dim
    for name, rows in (("q", model.heads * model.head_dim), ("k", kv), ("v", kv)):
        dim = None if replicates_keys and name != "q" else 0
        entries.append((f"{name}.weight", (rows, hidden), dim))
        if model.qkv_bias or model.bias:
            entries.append((f"{name}.bias", (rows,), dim))
    entries.append(("o.weight", (hidden, model.heads * model.head_dim), 1))
    if model.bias:
        entries.append(("o.bias", (hidden,), None))
    return entries


def _latent_entries(model: Architecture) -> list[Entry]:
    """Return the parameters of latent attention."""
    names = ("q_a", "q_b" if model.query_rank else "q", "kv_a", "kv_b", "o")
    # Latents are shared by all heads, so their products are not split.
    dims = (None, 0, None, 0, 1)
    products = zip(names, dims, model.products_of_attention, strict=True)
    entries: list[Entry] = []
    for name, dim, (inner, columns) in products:
        if columns:
            entries.append((f"{name}.weight", (int(columns), int(inner)), dim))
    for name, rank in (("q_a", model.query_rank), ("kv_a", model.latent_rank)):
        if rank:
            entries.append((f"{name}_norm", (rank,), None))
    return entries


def _expert_entries(model: Architecture) -> list[Entry]:
    """Return the parameters of the routed experts, the router and the shared experts."""
    hidden = model.hidden
    entries: list[Entry] = [
        (f"{_EXPERTS}gate_up", (model.experts, 2 * model.expert_ffn, hidden), None),
        (f"{_EXPERTS}down", (model.experts, hidden, model.expert_ffn), None),
        ("router", (model.experts, hidden), None),
    ]
    if model.shared_ffn:
        entries += [
            ("shared.up", (2 * model.shared_ffn, hidden), None),
            ("shared.down", (hidden, model.shared_ffn), None),
        ]
    return entries


def _mlp_entries(model: Architecture) -> list[Entry]:
    """Return the parameters of a dense MLP."""
    hidden = model.hidden
    entries: list[Entry] = []
    for name in ("gate", "up") if model.gated else ("up",):
        entries.append((f"{name}.weight", (model.ffn, hidden), 0))
        if model.bias:
            entries.append((f"{name}.bias", (model.ffn,), 0))
    entries.append(("down.weight", (hidden, model.ffn), 1))
    if model.bias:
        entries.append(("down.bias", (hidden,), None))
    return entries


def _gpt2_block(model: Architecture) -> list[Entry]:
    """Return the parameters of a block of GPT-2, whose `Conv1D` weights are [in, out]."""
    hidden = model.hidden
    return [
        ("attn.c_attn.weight", (hidden, 3 * hidden), 1),
        ("attn.c_attn.bias", (3 * hidden,), 0),
        ("attn.c_proj.weight", (hidden, hidden), 0),
        ("attn.c_proj.bias", (hidden,), None),
        ("mlp.c_fc.weight", (hidden, model.ffn), 1),
        ("mlp.c_fc.bias", (model.ffn,), 0),
        ("mlp.c_proj.weight", (model.ffn, hidden), 0),
        ("mlp.c_proj.bias", (hidden,), None),
        ("ln_1.weight", (hidden,), None),
        ("ln_1.bias", (hidden,), None),
        ("ln_2.weight", (hidden,), None),
        ("ln_2.bias", (hidden,), None),
    ]


def _adjust_to_count(
    model: Architecture, dense: list[Entry], routed: list[Entry], share: float
) -> tuple[list[Entry], list[Entry]]:
    """Adjust parameters such that a layer has as many elements as in the built model.

    Args:
        model: Sizes of the model.
        dense: Parameters of a layer without experts.
        routed: Parameters of a layer with experts.
        share: Fraction of the layers that have experts.

    Returns:
        `dense` and `routed`, adjusted.
    """
    more = float(model.unexplained_parameters)
    if not more:
        return dense, routed
    adjusted = _with_elements(dense, _elements(dense) + more)
    if share:
        more = (more - (1 - share) * (_elements(adjusted) - _elements(dense))) / share
        routed = _with_elements(routed, _elements(routed) + more)
    return adjusted, routed


def _elements(entries: list[Entry]) -> int:
    return sum(prod(shape) for _, shape, _ in entries)


def _with_elements(entries: list[Entry], count: float) -> list[Entry]:
    """Adjust parameters such that they have `count` elements in total.

    If elements are missing, a parameter is added. If there are too many, the smallest parameters
    shrink, starting with those that tensor parallelism does not split.
    """
    more = round(count) - _elements(entries)
    if more >= 0:
        return [*entries, ("besides", (more,), None)] if more else entries

    def size_order(index: int) -> tuple[bool, int]:
        _, shape, dim = entries[index]
        return dim is not None, prod(shape)

    reduced = list(entries)
    for index in sorted(range(len(entries)), key=size_order):
        name, shape, dim = entries[index]
        numel = max(prod(shape) + more, 0)
        more += prod(shape) - numel
        if numel != prod(shape):
            reduced[index] = (name, (numel,), None if dim is None else 0)
    return [entry for entry in reduced if prod(entry[1])]


def end_parameters(model: Architecture) -> dict[str, list[Entry]]:
    """Return the parameters outside the blocks, keyed by "embedding", "positions", "norm", "head".

    A head that is tied to the embedding has no parameters.
    """
    norm: list[Entry] = [("norm.weight", (model.hidden,), None)]
    if model.bias:
        norm.append(("norm.bias", (model.hidden,), None))
    positions: list[Entry] = []
    if model.positions:
        positions = [("positions", (model.positions, model.hidden), None)]
    embedding: list[Entry] = [("embedding", (model.vocab, model.hidden), 0)]
    if model.end_parameters:
        # All other parameters outside the layers are assumed to be before them.
        embedding = _with_elements(
            embedding, min(int(model.embedding_parameters), model.vocab * model.hidden)
        )
        more = int(model.embedding_parameters) - model.vocab * model.hidden
        positions = [("positions", (more,), None)] if more > 0 else []

    return {
        "embedding": embedding,
        "positions": positions,
        "norm": norm,
        "head": [] if model.tied else [("head", (model.vocab, model.hidden), 0)],
    }


def outer_ends(model: Architecture) -> frozenset[str]:
    """Return the keys of `end_parameters` that are separate sharding units if pp is 1.

    See `model.outer_layers`.
    """
    entries = end_parameters(model)
    smallest = LEAST_SHARE * sum(_elements(parameters) for parameters in entries.values())

    # Tied weights stay in the root unit. If the model states `end_parameters`, the entry
    # "positions" stands for the parameters of unknown layers.
    layers = set() if model.tied else {"embedding", "head"}
    if not model.end_parameters:
        layers.add("positions")
    return frozenset(end for end in layers if entries[end] and _elements(entries[end]) >= smallest)


def _model_facts(entries: list[Entry], unit: int) -> tuple[ModelFacts, Split]:
    parameters = tuple(
        ParameterFacts(name, shape, _MASTER_BYTES, True, unit) for name, shape, _ in entries
    )
    return ModelFacts(parameters, ("block",) if unit >= 0 else ()), {
        name: dim for name, _, dim in entries
    }


def account_rows(job: Job) -> States:
    """Return the bytes of model states for a job whose entries have different models.

    Measured runs are such jobs. Precisions may differ as well. See `account_states`.
    """
    size = np.size(job.sequence)
    names = [f.name for f in fields(Architecture)]
    keys: list[tuple[Any, ...]] = []
    for i in range(size):
        values = [np.asarray(getattr(job.model, name))[i].item() for name in names]
        keys.append((*values, int(job.precision[i])))

    parts = []
    # The ledger takes one model and one precision at a time.
    for key in dict.fromkeys(keys):
        index = np.array([i for i, other in enumerate(keys) if other == key])
        part = replace(job.take(index), model=Architecture(*key[:-1]))
        parts.append((index, account_states(part)))

    return cast("States", _combine(parts, size))


def _combine(parts: Sequence[tuple[np.ndarray, Any]], size: int) -> Any:
    """Merge the results for parts of a job into arrays with all entries of the job.

    Args:
        parts: (indices, result) pairs. Results are nested dataclasses and mappings of arrays. The
            last dimension of an array has the entries of the part.
        size: Number of entries of the job.
    """
    shape = parts[0][1]
    if isinstance(shape, Mapping):
        by_name = {}
        for name in shape:
            by_name[name] = _combine([(index, part[name]) for index, part in parts], size)
        return by_name
    if is_dataclass(shape):
        stacked = {}
        for f in fields(shape):
            values = [(index, getattr(part, f.name)) for index, part in parts]
            stacked[f.name] = _combine(values, size)
        return replace(shape, **stacked)  # type: ignore[type-var]

    array = np.asarray(shape)
    combined = np.zeros((*array.shape[:-1], size), dtype=array.dtype)
    for index, part in parts:
        combined[..., index] = part
    return combined


def account_states(
    job: Job,
    *,
    reduce: str = "float32",
    form: str | None = None,
    every_moment: bool = True,
) -> States:
    """Return the bytes of model states of every candidate.

    All candidates must have the same model and the same precision.

    Args:
        job: The candidates.
        reduce: Dtype of the gradient reduction.
        form: Format of AdamW's moments, a value of `optimizer.states`. None for the default.
        every_moment: See `pipeline.holdings`.
    """
    layouts = job.layouts
    size = max(map(np.size, vars(layouts).values()))
    # float32 is not cast, so it is None.
    compute = {"bf16": "bfloat16", "fp16": "float16"}.get(PRECISIONS[int(only(job.precision))])
    parts = _parts_of_model(job, size, compute=compute, reduce=reduce, form=form)
    ranks = _ranks(job, size, every_moment=every_moment)
    presence = _presence_of_ends(job, size)
    bytes_of_rank = {}
    units_of_rank = {}
    for (layers, holdings_of_rank), (rank, present) in zip(ranks, presence.items(), strict=True):
        bytes_of_rank[rank] = parts.bytes_on_rank(layers, present)
        units_of_rank[rank] = parts.units_on_rank(layers, present, holdings_of_rank)
    return States(**bytes_of_rank, units=units_of_rank)


def _presence_of_ends(job: Job, size: int) -> dict[str, dict[str, np.ndarray]]:
    """Return whether each rank of `RANKS` has each key of `end_parameters`, as 1 or 0."""
    single = _column(job.layouts.pp, size) == 1
    v_schedules = [SCHEDULES.index(name) for name in V_SHAPED]
    v_shaped = np.isin(_column(job.layouts.schedule, size), v_schedules) & ~single
    one = np.ones(size)
    zero = np.zeros(size)

    # The last stage of a V is on the first rank.
    has_both_ends = single | v_shaped
    tied = one if job.model.tied else zero
    first = {
        "embedding": one,
        "positions": one,
        "norm": has_both_ends * one,
        "head": has_both_ends * one,
    }
    last = {
        # A tied head is a copy of the embedding.
        "embedding": np.where(single, one, np.where(v_shaped, zero, tied)),
        "positions": np.where(single, one, zero),
        "norm": np.where(v_shaped, zero, one),
        "head": np.where(v_shaped, zero, one),
    }
    return {"first": first, "last": last, "inner": dict.fromkeys(first, zero)}


Bytes = dict[str, np.ndarray]
"""Bytes by kind, one entry per candidate.

Kinds are weights, gradients, optimizer, on_device (gradients that stay there with the optimizer on
the host), gathered, and unsharded (all weights in the dtype of computation).
"""


@dataclass(frozen=True)
class _DistinctLayouts:
    """Distinct combinations of the layout fields that determine the bytes of model states.

    There are far fewer combinations than candidates. `inverse` is the index of each candidate's
    combination.
    """

    degrees: dict[str, np.ndarray]
    """Arguments of `Ledger.start`."""
    stage: np.ndarray
    inverse: np.ndarray

    @classmethod
    def of(cls, job: Job, size: int) -> _DistinctLayouts:
        layouts = job.layouts
        names = ["tp", "dp_replicate", "dp_shard", "stage"]
        # Only shards of experts depend on the degrees of cp and ep.
        if job.model.experts:
            names += ["cp", "ep"]
        columns = {name: _column(getattr(layouts, name), size) for name in names}

        # States only depend on whether there are several micro-batches.
        accumulates = (_column(layouts.accumulation, size) > 1).astype(np.int64)
        # One integer per combination in mixed radix, which is sorted faster than rows of integers.
        key = accumulates
        for column in columns.values():
            key = key * (int(column.max()) + 1) + column
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        degrees = {name: column[first] for name, column in columns.items()}
        stage = degrees.pop("stage")
        return cls(degrees | {"accumulation": accumulates[first] + 1}, stage, inverse)

    def account(
        self, entries: list[Entry], unit: int, *, compute: str | None, reduce: str, form: str | None
    ) -> Bytes:
        """Return the bytes of model states of parameters, per combination of layout fields.

        Args:
            entries: The parameters.
            unit: 0 for the parameters of a block, -1 for parameters outside the blocks.
            compute: Dtype of forward and backward. None computes in float32.
            reduce: See `account_states`.
            form: See `account_states`.
        """
        none = np.zeros(len(self.stage))
        if not entries:
            kinds = ("weights", "gradients", "optimizer", "on_device", "gathered", "unsharded")
            return dict.fromkeys(kinds, none)

        facts, dims = _model_facts(entries, unit)
        ledger = Ledger.start(**self.degrees, optimizer_states=form, tensor_dims=dims)
        if compute:
            ledger = Precision.sweep(compute=compute, reduce=reduce).account(ledger, facts)
        data_parallel = DataParallel.sweep(stage=self.stage)
        memory = data_parallel.account(ledger, facts).memory
        experts = frozenset(name for name, _, _ in entries if name.startswith(_EXPERTS))
        if experts and (ledger.ep > 1).any():
            split = data_parallel.account(ledger.with_(experts=experts), facts).memory
            memory = {
                name: np.where(ledger.ep > 1, split[name], value) for name, value in memory.items()
            }

        width = 2 if compute else 4
        unsharded = none
        for name, shape, dim in entries:
            ranks: Any = ledger.ep if name in experts else 1
            if dim is not None:
                ranks = ledger.tp
            unsharded = unsharded + width * np.ceil(np.prod(shape, dtype=float) / ranks)

        return {
            "weights": memory["parameters"],
            # Gradients stay unsharded until the last micro-batch, which replaces them with shards
            # block by block.
            "gradients": np.maximum(memory["gradients"], memory["unsharded_gradients"]),
            "optimizer": memory["optimizer"],
            "on_device": memory["unsharded_gradients"],
            "gathered": memory["gathered_parameters"],
            "unsharded": unsharded,
        }


def _column(field: Any, size: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(field, dtype=np.int64), (size,))


@dataclass(frozen=True)
class _PartsOfModel:
    """Bytes of a block and of the ends of a model, whose sums are the bytes of a rank.

    Attributes:
        block: Bytes of one block, averaged over dense and expert layers.
        ends: Bytes of each end, by the keys of `end_parameters`.
        outer: Ends that are separate sharding units if pp is 1.
        single: Whether there is only one pipeline stage.
        is_stage_3: Whether the ZeRO stage is 3.
        sharded: Whether `fully_shard` is used.
        gathers: Whether any candidate gathers weights or casts them.
        shards: Number of shards of a unit.
        offloaded: Share of the parameters whose optimizer states are on the host.
        computes_in_16_bits: Whether weights are cast for forward and backward.
        tied: Whether the head shares the weight of the embedding.
    """

    block: Bytes
    ends: dict[str, Bytes]
    outer: frozenset[str]
    single: np.ndarray
    is_stage_3: np.ndarray
    sharded: np.ndarray
    gathers: bool
    shards: np.ndarray
    offloaded: np.ndarray
    computes_in_16_bits: bool
    tied: bool

    def bytes_on_rank(self, layers: np.ndarray, present: Bytes) -> Bytes:
        """Return the bytes on a rank with `layers` blocks.

        Args:
            layers: Number of blocks on the rank.
            present: Whether the rank has each of the `ends`, as 1 or 0.
        """
        ends = self.ends
        states = {}
        for kind, value in self.block.items():
            at_ends = sum(ends[end][kind] * there for end, there in present.items())
            states[kind] = value * layers + at_ends

        # While a block is computed, it and the next block are gathered, at stage 3 also the root
        # unit. At the loss the head and one block are gathered. The gradient of a block and the
        # buffer of its reduction are unsharded. Without accumulation stages 1 and 2 gather only
        # during the step.
        unit = self.block["unsharded"]
        root = sum(ends[end]["unsharded"] * there for end, there in present.items())
        outer = sum(
            np.where(self.single, ends[end]["unsharded"] * present[end], 0) for end in self.outer
        )
        head: Any = 0
        if "head" in self.outer:
            head = np.where(self.single, ends["head"]["unsharded"] * present["head"], 0)
        gradients = unit * (3 if self.computes_in_16_bits else 2)
        at_stage_3 = unit + np.maximum(unit, head) + root - outer
        before_stage_3 = np.where(states["gathered"] > 0, 0, unit * layers + root)
        moving = np.where(self.is_stage_3, at_stage_3, before_stage_3) + gradients
        states["gathered"] = states["gathered"] + np.where(self.sharded & self.gathers, moving, 0)

        # The host has the master weights, the shards of their gradients, and the optimizer states.
        offloaded = self.offloaded
        on_device = 1 - offloaded
        states["host"] = offloaded * (states["weights"] + states["gradients"] + states["optimizer"])
        states["weights"] = states["weights"] * on_device
        states["optimizer"] = states["optimizer"] * on_device
        states["gradients"] = states["gradients"] * on_device + states["on_device"] * offloaded
        states["offloaded"] = offloaded
        return states

    def units_on_rank(
        self, layers: np.ndarray, present: Bytes, holdings_of_rank: Holdings
    ) -> Units:
        """Return the sharding units of a rank. See `bytes_on_rank` for the arguments."""
        head = self._elements(self.ends["embedding" if self.tied else "head"])
        outer = {
            end: np.where(self.single, self._elements(self.ends[end]) * present[end], 0.0)
            for end in self.outer
        }
        embeddings = [numel for end, numel in outer.items() if end != "head"]
        zero = np.zeros(len(self.single))
        root = np.asarray(
            sum(self._elements(self.ends[end]) * there for end, there in present.items())
        )

        return Units(
            layers=layers,
            block=self._elements(self.block),
            root=root,
            embedding_units=np.asarray(sum(embeddings, start=zero)),
            head_unit=outer.get("head", zero),
            late_unit=np.max([root - sum(outer.values(), start=zero), *embeddings], axis=0),
            head=head * present["norm"],
            width=2 if self.computes_in_16_bits else 4,
            sharded=self.sharded,
            holdings=holdings_of_rank,
        )

    def _elements(self, part: Bytes) -> np.ndarray:
        return part["weights"] / _MASTER_BYTES * self.shards


def _parts_of_model(
    job: Job, size: int, *, compute: str | None, reduce: str, form: str | None
) -> _PartsOfModel:
    model = job.model
    distinct = _DistinctLayouts.of(job, size)
    inverse = distinct.inverse
    account = partial(distinct.account, compute=compute, reduce=reduce, form=form)

    expert_share = float(model.expert_layers / model.layers)
    routed_entries: list[Entry] = []
    if expert_share:
        routed_entries = block_parameters(model, experts=True)
    dense_entries, routed_entries = _adjust_to_count(
        model, block_parameters(model), routed_entries, expert_share
    )
    dense = account(dense_entries, 0)
    routed = account(routed_entries, 0) if expert_share else {}
    replicates_keys = distinct.degrees["tp"] > model.kv_heads
    if replicates_keys.any() and not job.replicates_attention and not model.latent_rank:
        entries, _ = _adjust_to_count(model, block_parameters(model, replicates_keys=True), [], 0.0)
        with_replicated_keys = account(entries, 0)
        dense = {
            kind: np.where(replicates_keys, with_replicated_keys[kind], value)
            for kind, value in dense.items()
        }

    block = {
        kind: ((1 - expert_share) * value + expert_share * routed.get(kind, 0))[inverse]
        for kind, value in dense.items()
    }
    ends = {}
    for end, entries in end_parameters(model).items():
        ends[end] = {kind: value[inverse] for kind, value in account(entries, -1).items()}

    dp_shard = _column(job.layouts.dp_shard, size)
    sharded = (dp_shard > 1) | (compute is not None)
    return _PartsOfModel(
        block=block,
        ends=ends,
        outer=outer_ends(model),
        single=_column(job.layouts.pp, size) == 1,
        is_stage_3=_column(job.layouts.stage, size) == 3,
        sharded=sharded,
        gathers=compute is not None or bool((dp_shard > 1).any()),
        shards=np.where(sharded, dp_shard, 1),
        offloaded=np.broadcast_to(np.asarray(job.layouts.offload, dtype=float), (size,)),
        computes_in_16_bits=compute is not None,
        tied=bool(model.tied),
    )


def _ranks(job: Job, size: int, *, every_moment: bool) -> list[tuple[np.ndarray, Holdings]]:
    """Return (number of layers, `Holdings`) for each pipeline rank of `RANKS`.

    The model is partitioned as in the engine: all blocks have equal cost, and the last stage also
    has the cost of the head (`pipeline.estimates.forward_costs`, in elements).
    """
    layouts = job.layouts
    rows = [
        _column(field, size)
        for field in (layouts.pp, layouts.vpp, layouts.schedule, layouts.accumulation)
    ]
    kinds, inverse = np.unique(np.stack(rows, axis=1), axis=0, return_inverse=True)
    inverse = inverse.ravel()
    cuts: dict[int, Sequence[int]] = {}
    layers: list[list[int]] = [[], [], []]
    holding_rows: list[list[np.ndarray]] = [[], [], []]

    for pp, chunks, kind, micro_batches in kinds.tolist():
        stages = pp * chunks
        if stages not in cuts:
            cuts[stages] = _cut(job.model, stages)
        blocks = []
        for rank in range(pp):
            stages_of = stages_of_rank(kind, pp, rank, chunks)
            blocks.append(tuple(cuts[stages][stage] for stage in stages_of))
        flights = in_flight(
            Layouts(pp=pp, vpp=chunks, schedule=kind, accumulation=micro_batches), np.arange(pp)
        )
        saved = [sum(blocks[rank]) * flights[rank] for rank in range(pp)]
        fullest = max(range(1, pp - 1), key=saved.__getitem__, default=0)
        for index, rank in enumerate((0, pp - 1, fullest)):
            layers[index].append(sum(blocks[rank]))
            holding_rows[index].append(rank_holdings(kind, pp, micro_batches, rank, blocks[rank]))

    ranks: list[tuple[np.ndarray, Holdings]] = []
    for counts, table in zip(layers, holding_rows, strict=True):
        layers_of_rank = np.array(counts, dtype=float)[inverse]
        ranks.append((layers_of_rank, holdings(table, inverse, every_moment=every_moment)))
    return ranks


def _cut(model: Architecture, stages: int) -> Sequence[int]:
    """Return the number of layers of every pipeline stage."""
    layers = int(model.layers)
    if stages > layers:
        # Estimated for comparison; no engine runs it.
        return [-(-layers // stages)] * stages
    block = float(model.block_parameters / model.layers) - float(model.small_parameters)
    return balance_stages([block] * layers, stages, last=float(model.vocab * model.hidden))
