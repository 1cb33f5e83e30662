"""Model states of Plait itself, to the byte, from the techniques' own accounts: the ledger is asked
for the embedding, one block and the head, and a stage is the sum of what it holds.

The facts are written from an Architecture, so no model is built; tests compare them with those of
the Transformers model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from math import prod
from typing import Any

import numpy as np

from plait.model.facts import ModelFacts, ParameterFacts
from plait.model.outer_units import LEAST_SHARE
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.data.data_parallel import DataParallel
from plait.parallel.pipeline.balance import cut
from plait.parallel.precision.mixed_precision import Precision
from plait.planner.architecture import Architecture
from plait.planner.hardware import PRECISIONS
from plait.planner.holdings import Holdings, found, holdings
from plait.planner.job import SCHEDULES, Job, Layouts
from plait.planner.peak import States, Units
from plait.planner.pipeline import in_flight

_MASTER_BYTES = 4
"""Plait's optimizer updates float32 parameters unless `model.dtype` says otherwise."""

_EXPERTS = "experts."
"""Before the names of parameters that `ep` splits."""

Split = dict[str, int | None]
Entry = tuple[str, tuple[int, ...], int | None]
"""(name, shape, dimension split over tp) of a parameter."""


def block_parameters(
    model: Architecture, *, experts: bool = False, whole_keys: bool = False
) -> list[Entry]:
    """(name, shape, dimension split over tp) of every parameter of one block, as Transformers
    shapes them. With `whole_keys` there are fewer key and value heads than ranks, which replicate
    these.
    """
    h = model.hidden
    width = model.heads * model.head_dim
    kv = model.kv_heads * model.head_dim
    found: list[Entry] = []
    if model.model_type == "gpt2":
        found += [("attn.c_attn.weight", (h, 3 * h), 1), ("attn.c_attn.bias", (3 * h,), 0)]
        found += [("attn.c_proj.weight", (h, h), 0), ("attn.c_proj.bias", (h,), None)]
        found += [("mlp.c_fc.weight", (h, model.ffn), 1), ("mlp.c_fc.bias", (model.ffn,), 0)]
        found += [("mlp.c_proj.weight", (model.ffn, h), 0), ("mlp.c_proj.bias", (h,), None)]
        return found + [
            (f"ln_{i}.{leaf}", (h,), None) for i in (1, 2) for leaf in ("weight", "bias")
        ]
    if model.latent_rank:
        names = ("q_a", "q_b" if model.query_rank else "q", "kv_a", "kv_b", "o")
        dims = (None, 0, None, 0, 1)  # the latents are those of all heads
        for name, dim, (inner, columns) in zip(
            names, dims, model.products_of_attention, strict=True
        ):
            if columns:
                found.append((f"{name}.weight", (int(columns), int(inner)), dim))
        found += [
            (f"{name}_norm", (rank,), None)
            for name, rank in (("q_a", model.query_rank), ("kv_a", model.latent_rank))
            if rank
        ]
    else:
        for name, rows in (("q", width), ("k", kv), ("v", kv)):
            dim = None if whole_keys and name != "q" else 0
            found.append((f"{name}.weight", (rows, h), dim))
            if model.qkv_bias or model.bias:
                found.append((f"{name}.bias", (rows,), dim))
        found.append(("o.weight", (h, width), 1))
        if model.bias:
            found.append(("o.bias", (h,), None))
    if model.qk_norm:
        found += [("q_norm", (model.head_dim,), None), ("k_norm", (model.head_dim,), None)]
    if experts:
        found += [
            (f"{_EXPERTS}gate_up", (model.experts, 2 * model.expert_ffn, h), None),
            (f"{_EXPERTS}down", (model.experts, h, model.expert_ffn), None),
        ]
        found.append(("router", (model.experts, h), None))
        if model.shared_ffn:
            found += [
                ("shared.up", (2 * model.shared_ffn, h), None),
                ("shared.down", (h, model.shared_ffn), None),
            ]
    else:
        for name in ("gate", "up") if model.gated else ("up",):
            found.append((f"{name}.weight", (model.ffn, h), 0))
            if model.bias:
                found.append((f"{name}.bias", (model.ffn,), 0))
        found.append(("down.weight", (h, model.ffn), 1))
        if model.bias:
            found.append(("down.bias", (h,), None))
    leaves = ("weight", "bias") if model.bias else ("weight",)
    return found + [(f"norm{i}.{leaf}", (h,), None) for i in (1, 2) for leaf in leaves]


def _counted(
    model: Architecture, dense: list[Entry], routed: list[Entry], share: float
) -> tuple[list[Entry], list[Entry]]:
    """Parameters of a layer without and of one with experts, of which `share` of the layers are,
    with as many elements on average as were counted of the model itself.
    """
    more = float(model.unexplained_parameters)
    if not more:
        return dense, routed
    found = _with_elements(dense, _elements(dense) + more)
    if share:
        more = (more - (1 - share) * (_elements(found) - _elements(dense))) / share
        routed = _with_elements(routed, _elements(routed) + more)
    return found, routed


def _elements(entries: list[Entry]) -> int:
    return sum(prod(shape) for _, shape, _ in entries)


def _with_elements(entries: list[Entry], count: float) -> list[Entry]:
    """With one more parameter, or with fewer elements, those first that tensor parallelism does not
    split.
    """
    more = round(count) - _elements(entries)
    if more >= 0:
        return [*entries, ("besides", (more,), None)] if more else entries
    left = {}
    for index, (_, shape, dim) in sorted(
        enumerate(entries), key=lambda one: (one[1][2] is not None, prod(one[1][1]))
    ):
        kept = max(prod(shape) + more, 0)
        more += prod(shape) - kept
        left[index] = (shape, dim) if kept == prod(shape) else ((kept,), None if dim is None else 0)
    return [
        (name, *left[index]) for index, (name, _, _) in enumerate(entries) if prod(left[index][0])
    ]


def end_parameters(model: Architecture) -> dict[str, list[Entry]]:
    """The same of the embedding, of learned positions, and of the final norm and the head. A tied
    head is the embedding.
    """
    norm: list[Entry] = [("norm.weight", (model.hidden,), None)]
    if model.bias:
        norm.append(("norm.bias", (model.hidden,), None))
    positions: list[Entry] = (
        [("positions", (model.positions, model.hidden), None)] if model.positions else []
    )
    embedding: list[Entry] = [("embedding", (model.vocab, model.hidden), 0)]
    if model.end_parameters:  # whatever else is outside of the layers is before them
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
    """Return the keys of `end_parameters` that are outer units (`model.outer_units`) without a
    pipeline.
    """
    entries = end_parameters(model)
    smallest = LEAST_SHARE * sum(_elements(parameters) for parameters in entries.values())
    # Tied weights stay in the root unit. If the model states `end_parameters`, the entry
    # "positions" stands for the parameters of unknown layers.
    layers = set() if model.tied else {"embedding", "head"}
    if not model.end_parameters:
        layers.add("positions")
    return frozenset(end for end in layers if entries[end] and _elements(entries[end]) >= smallest)


def _facts(entries: list[Entry], unit: int) -> tuple[ModelFacts, Split]:
    parameters = tuple(
        ParameterFacts(name, shape, _MASTER_BYTES, True, unit) for name, shape, _ in entries
    )
    return ModelFacts(parameters, ("block",) if unit >= 0 else ()), {
        name: dim for name, _, dim in entries
    }


def account_rows(job: Job) -> States:
    """The same for a job of which every entry may have a model and a precision of its own, as
    measured runs do.
    """
    size = np.size(job.sequence)
    names = [f.name for f in fields(Architecture)]
    keys = [
        (*(np.asarray(getattr(job.model, name))[i].item() for name in names), int(job.precision[i]))
        for i in range(size)
    ]
    parts = []
    for key in dict.fromkeys(keys):
        index = np.array([i for i, other in enumerate(keys) if other == key])
        part = replace(job.take(index), model=Architecture(*key[:-1]))
        parts.append(
            (
                index,
                account_states(
                    part, compute={"bf16": "bfloat16", "fp16": "float16"}.get(PRECISIONS[key[-1]])
                ),
            )
        )
    whole: States = _stacked(parts, size)
    return whole


def _stacked(parts: Sequence[tuple[np.ndarray, Any]], size: int) -> Any:
    """Parts of the same form put together, each at its places: of dataclasses and mappings, down to
    their arrays, whose last dimension it is.
    """
    shape = parts[0][1]
    if isinstance(shape, Mapping):
        return {
            name: _stacked([(index, part[name]) for index, part in parts], size) for name in shape
        }
    if is_dataclass(shape):
        stacked = {
            f.name: _stacked([(index, getattr(part, f.name)) for index, part in parts], size)
            for f in fields(shape)
        }
        return replace(shape, **stacked)  # type: ignore[type-var]
    array = np.asarray(shape)
    whole = np.zeros((*array.shape[:-1], size), dtype=array.dtype)
    for index, part in parts:
        whole[..., index] = part
    return whole


def account_states(
    job: Job,
    *,
    compute: str | None = "bfloat16",
    reduce: str = "float32",
    inner: int | None = None,
    form: str | None = None,
    every_moment: bool = True,
) -> States:
    """Bytes of weights, gradients, optimizer states and gathered copies on the first, the last and
    an inner rank, for every candidate of one model.

    `compute` is the dtype of forward and backward, `reduce` that of the reduction; None computes in
    float32. `inner` is the rank to price between the ends; by default the one that keeps most;
    `form` is what AdamW's averages are kept in; `every_moment`: see `holdings.holdings`.
    """
    at = job.layouts
    model = job.model
    size = max(
        np.size(x)
        for x in (
            at.tp,
            at.dp_replicate,
            at.dp_shard,
            at.stage,
            at.accumulation,
            at.pp,
            at.cp,
            at.ep,
        )
    )
    axes = (
        at.tp,
        at.dp_replicate,
        at.dp_shard,
        at.stage,
        *((at.cp, at.ep) if model.experts else ()),
    )
    fields = [np.broadcast_to(np.asarray(x, dtype=np.int64), (size,)) for x in axes]
    several = np.broadcast_to(np.asarray(at.accumulation) > 1, (size,)).astype(np.int64)
    key = several
    for values in fields:
        key = key * (int(values.max()) + 1) + values
    unique, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    tp, replicate, shard, stage, *more = (values[first] for values in fields)
    cp, ep = more or (np.ones_like(tp), np.ones_like(tp))
    accumulation = several[first] + 1

    def account(entries: list[Entry], unit: int) -> dict[str, np.ndarray]:
        if not entries:
            return {
                name: np.zeros(len(unique))
                for name in ("weights", "gradients", "optimizer", "on_device", "gathered", "whole")
            }
        facts, dims = _facts(entries, unit)
        ledger = Ledger.start(
            tp=tp,
            dp_replicate=replicate,
            dp_shard=shard,
            accumulation=accumulation,
            cp=cp,
            ep=ep,
            optimizer_states=form,
        )
        ledger = ledger.with_(tensor_dims=dims)
        if compute:
            ledger = Precision.sweep(compute=compute, reduce=reduce).account(ledger, facts)
        memory = DataParallel.sweep(stage=stage).account(ledger, facts).memory
        experts = frozenset(name for name, _, _ in entries if name.startswith(_EXPERTS))
        if experts and (ep > 1).any():
            split = (
                DataParallel.sweep(stage=stage).account(ledger.with_(experts=experts), facts).memory
            )
            memory = {name: np.where(ep > 1, split[name], value) for name, value in memory.items()}
        width = 2 if compute else 4
        whole = np.zeros(len(unique))
        for name, shape, dim in entries:
            whole = whole + width * np.ceil(
                np.prod(shape, dtype=float)
                / (tp if dim is not None else ep if name in experts else 1)
            )
        return {
            "weights": memory["parameters"],
            # Whole until the last micro-batch, then block by block the shards in their place.
            "gradients": np.maximum(memory["gradients"], memory["unsharded_gradients"]),
            "optimizer": memory["optimizer"],
            "on_device": memory["unsharded_gradients"],
            "gathered": memory["gathered_parameters"],
            "whole": whole,
        }

    share = float(model.expert_layers / model.layers)
    entries, with_experts = _counted(
        model,
        block_parameters(model),
        block_parameters(model, experts=True) if share else [],
        share,
    )
    dense = account(entries, 0)
    routed = account(with_experts, 0) if share else {}
    if (tp > model.kv_heads).any() and not job.whole_attention and not model.latent_rank:
        whole_keys = account(
            _counted(model, block_parameters(model, whole_keys=True), [], 0.0)[0], 0
        )
        dense = {
            name: np.where(tp > model.kv_heads, whole_keys[name], value)
            for name, value in dense.items()
        }
    block = {
        name: ((1 - share) * value + share * routed.get(name, 0))[inverse]
        for name, value in dense.items()
    }
    ends = {
        name: {k: v[inverse] for k, v in account(entries, -1).items()}
        for name, entries in end_parameters(model).items()
    }
    pp = np.broadcast_to(np.asarray(at.pp), (size,))
    single = pp == 1
    third = fields[3] == 3
    casts = compute is not None or bool((fields[2] > 1).any())
    sharded = (fields[2] > 1) | (compute is not None)
    off = np.broadcast_to(np.asarray(at.offload, dtype=float), (size,))
    shards = np.where(sharded, fields[2], 1)
    outer = outer_ends(model)

    def held(layers: np.ndarray, on: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        taken = {
            name: value * layers + sum(ends[end][name] * there for end, there in on.items())
            for name, value in block.items()
        }
        # While a block is computed, it and the next block are gathered, at stage 3 also the root
        # unit. At the loss the head and one block are gathered. The gradient of a block and the
        # buffer of its reduction are unsharded. Without accumulation stages 1 and 2 gather only
        # during the step.
        unit = block["whole"]
        ends_whole = sum(ends[end]["whole"] * there for end, there in on.items())
        outer_whole = sum(np.where(single, ends[end]["whole"] * on[end], 0) for end in outer)
        head = np.where(single, ends["head"]["whole"] * on["head"], 0) if "head" in outer else 0
        grads = unit * (3 if compute else 2)
        once = unit * layers + ends_whole
        at_stage_3 = unit + np.maximum(unit, head) + ends_whole - outer_whole
        moving = np.where(third, at_stage_3, np.where(taken["gathered"] > 0, 0, once)) + grads
        taken["gathered"] = taken["gathered"] + np.where(sharded & casts, moving, 0)
        # On the host: the master weights, the shards of their gradients, and the states.
        taken["host"] = off * (taken["weights"] + taken["gradients"] + taken["optimizer"])
        taken["weights"] = taken["weights"] * (1 - off)
        taken["optimizer"] = taken["optimizer"] * (1 - off)
        taken["gradients"] = taken["gradients"] * (1 - off) + taken["on_device"] * off
        taken["offloaded"] = off
        return taken

    def units(layers: np.ndarray, on: dict[str, np.ndarray], flight: Holdings) -> Units:
        def elements(entry: dict[str, np.ndarray]) -> np.ndarray:
            return entry["weights"] / _MASTER_BYTES * shards

        head = elements(ends["embedding" if model.tied else "head"])
        outer_units = {end: np.where(single, elements(ends[end]) * on[end], 0.0) for end in outer}
        embeddings = [numel for end, numel in outer_units.items() if end != "head"]
        none = np.zeros(size)
        root = np.asarray(sum(elements(ends[end]) * there for end, there in on.items()))
        return Units(
            layers=layers,
            block=elements(block),
            root=root,
            embedding_units=np.asarray(sum(embeddings, start=none)),
            head_unit=outer_units.get("head", none),
            late_unit=np.max([root - sum(outer_units.values(), start=none), *embeddings], axis=0),
            head=head * on["norm"],
            width=2 if compute else 4,
            sharded=sharded,
            held=flight,
        )

    (first_layers, first_held), (last_layers, last_held), (inner_layers, inner_held) = _ranks(
        job, size, inner, every_moment=every_moment
    )
    v_shaped = (
        np.broadcast_to(
            np.isin(
                np.asarray(at.schedule), [SCHEDULES.index("zbv"), SCHEDULES.index("dualpipev")]
            ),
            (size,),
        )
        & ~single
    )
    one = np.ones(size)
    none = np.zeros(size)
    both = single | v_shaped  # a V ends where it began
    tied = one if model.tied else none
    first_on = {"embedding": one, "positions": one, "norm": both * one, "head": both * one}
    last_on = {
        "embedding": np.where(single, one, np.where(v_shaped, none, tied)),
        "positions": np.where(single, one, none),
        "norm": np.where(v_shaped, none, one),
        "head": np.where(v_shaped, none, one),
    }
    inner_on = dict.fromkeys(first_on, none)
    return States(
        held(first_layers, first_on),
        held(last_layers, last_on),
        held(inner_layers, inner_on),
        units={
            "first": units(first_layers, first_on, first_held),
            "last": units(last_layers, last_on, last_held),
            "inner": units(inner_layers, inner_on, inner_held),
        },
    )


def _ranks(
    job: Job, size: int, inner: int | None, *, every_moment: bool
) -> list[tuple[np.ndarray, Holdings]]:
    """(layers, what is held) of the first and of the last rank of a pipeline, and of `inner`, by
    default of the rank between them that keeps most. Cut as the engine cuts: alike blocks, and the
    head's product on the last stage (`stages.forward_costs`, in elements).
    """
    model = job.model
    at = job.layouts
    rows = [
        np.broadcast_to(np.asarray(x, dtype=np.int64), (size,))
        for x in (at.pp, at.vpp, at.schedule, at.accumulation)
    ]
    block = float(model.block_parameters / model.layers) - float(model.small_parameters)
    kinds, inverse = np.unique(np.stack(rows, axis=1), axis=0, return_inverse=True)
    cuts: dict[int, Sequence[int]] = {}
    of_ranks: list[list[tuple[int, ...]]] = [[], [], []]
    held: list[list[np.ndarray]] = [[], [], []]
    for ranks, chunks, kind, micro_batches in kinds.tolist():
        stages = ranks * chunks
        if stages not in cuts:
            even = stages > model.layers  # priced for comparison; no engine runs it
            weights = [block] * int(model.layers)
            last = float(model.vocab * model.hidden)
            cuts[stages] = (
                [-(-int(model.layers) // stages)] * stages
                if even
                else cut(weights, stages, last=last)
            )
        counts = cuts[stages]
        in_a_v = SCHEDULES[kind] in ("zbv", "dualpipev")
        blocks = [
            (counts[r], counts[-1 - r]) if in_a_v and ranks > 1 else tuple(counts[r::ranks])
            for r in range(ranks)
        ]
        between = [inner] if inner is not None else range(1, ranks - 1)
        flights = in_flight(
            Layouts(pp=ranks, vpp=chunks, schedule=kind, accumulation=micro_batches),
            np.arange(ranks),
        )
        fullest = max(
            (r for r in between if 0 < r < ranks - 1),
            key=lambda r: sum(blocks[r]) * flights[r],
            default=0,
        )
        for index, rank in enumerate((0, ranks - 1, fullest)):
            of_ranks[index].append(blocks[rank])
            held[index].append(found(kind, ranks, micro_batches, rank, blocks[rank]))
    of_all = inverse.ravel()
    layers = [np.array([sum(blocks) for blocks in one], dtype=float)[of_all] for one in of_ranks]
    return [
        (count, holdings(rows, of_all, every_moment=every_moment))
        for count, rows in zip(layers, held, strict=True)
    ]
