"""How many attention heads a module computes, and whether a degree can split them.

A tp rank computes complete heads. The number of query heads must be divisible by the degree. That
of key-value heads must be too, or must divide the degree: then they are replicated, and each rank
computes the one that its queries use. Nothing here looks at weights' values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from plait.errors import Problem, refuse
from plait.model.rules import Style

HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_q_heads",
    "n_local_heads",
)
"""Attributes under which modules keep their number of (query) heads."""
KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_kv_head",
    "kv_heads",
    "n_local_kv_heads",
)
"""The same for keys and values."""
GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
"""The same for queries per key."""
WIDTHS = (
    "head_dim",
    "head_size",
    "attention_head_size",
    "d_head",
    "dim_head",
    "hidden_size_per_attention_head",
)
"""The same for a head's width."""

QUERY_NAMES = frozenset(
    {"q_proj", "query", "q", "wq", "to_q", "q_lin", "query_proj", "linear_q", "q_linear"}
)
KEY_VALUE_NAMES = frozenset(
    {"k_proj", "v_proj", "key", "value", "k", "v", "wk", "wv", "to_k", "to_v", "k_lin", "v_lin"}
    | {"key_proj", "value_proj", "linear_k", "linear_v", "k_linear", "v_linear"}
)
FUSED_NAMES = frozenset(
    {
        "query_key_value",
        "qkv_proj",
        "qkv",
        "c_attn",
        "Wqkv",
        "wqkv",
        "in_proj",
        "to_qkv",
        "qkv_linear",
    }
)


@dataclass(frozen=True)
class Attention:
    """A module that owns split projections of heads. `heads` and `kv_heads` are None where the
    model does not define them.
    """

    name: str
    heads: int | None
    kv_heads: int | None
    heads_field: str
    kv_field: str
    columns: tuple[str, ...]
    """Full names of its column-split layers."""
    keys_values: tuple[str, ...]
    """Those of them that compute keys or values alone."""
    fused: tuple[str, ...]
    """Those that compute queries, keys and values together, head after head."""


def find_attentions(model: nn.Module, styles: Mapping[str, Style]) -> tuple[Attention, ...]:
    """Modules whose own children are column-split attention projections, outputs left split."""
    children: dict[str, list[str]] = {}
    for name, style in styles.items():
        if style in ("colwise", "kv_replicated"):
            children.setdefault(name.rpartition(".")[0], []).append(name)
    found = []
    for parent, columns in children.items():
        module = model.get_submodule(parent)
        leaves = {name: name.rpartition(".")[2] for name in columns}
        named = any(leaf in QUERY_NAMES | KEY_VALUE_NAMES | FUSED_NAMES for leaf in leaves.values())
        counted = len(columns) >= 3 and count_attributes(module)
        if not named and not counted and "attention" not in type(module).__name__.lower():
            continue
        heads, heads_field = _count(module, model, HEADS)
        kv_heads, kv_field = _count(module, model, KV_HEADS)
        keys_values = tuple(name for name, leaf in leaves.items() if leaf in KEY_VALUE_NAMES)
        width = _count(module, model, WIDTHS)[0]
        if keys_values and width:
            kv_heads = _by_width(model, keys_values, width, kv_heads)
        if kv_heads is None and heads is not None:
            # a layer that reads another's keys has no projection of its own
            groups = _count(module, model, GROUPS)[0]
            kv_heads = heads // groups if groups is not None else None
        if kv_heads is None:
            kv_heads = heads
            kv_field = heads_field
        fused = tuple(name for name, leaf in leaves.items() if leaf in FUSED_NAMES)
        found.append(
            Attention(
                parent, heads, kv_heads, heads_field, kv_field, tuple(columns), keys_values, fused
            )
        )
    return tuple(found)


def head_width(model: nn.Module, attention: Attention) -> int | None:
    """Width of one head of `attention`, where the model defines it or its query projection shows
    it.
    """
    width = _count(model.get_submodule(attention.name), model, WIDTHS)[0]
    queries = [name for name in attention.columns if name.rpartition(".")[2] in QUERY_NAMES]
    if width is not None or attention.heads is None or not queries:
        return width
    return (
        int(getattr(model.get_submodule(queries[0]), "out_features", 0)) // attention.heads or None
    )


def count_attributes(module: nn.Module) -> tuple[str, ...]:
    """The integers of a module that count heads, by their usual names."""
    return tuple(
        name for name in (*HEADS, *KV_HEADS, *GROUPS) if _integer(module, name) is not None
    )


def local_count(attention: Attention, attribute: str, tp: int) -> int | None:
    """What `attribute` of `attention`'s module must be on a rank; None when the number of heads is
    unknown.
    """
    if attention.heads is None or attention.kv_heads is None:
        return None
    heads = attention.heads // tp
    kv_heads = max(1, attention.kv_heads // tp)
    if attribute in GROUPS:
        return heads // kv_heads
    return kv_heads if attribute in KV_HEADS else heads


def replicates_keys(attention: Attention, tp: int) -> bool:
    """Whether `tp` ranks share this module's key and value heads, which are fewer."""
    return (
        attention.kv_heads is not None and attention.kv_heads < tp and bool(attention.keys_values)
    )


def check_heads(attentions: Sequence[Attention], tp: int) -> None:
    """Raise ConfigError, with every rule broken and the degrees that would do, unless each of `tp`
    ranks can get complete heads.
    """
    problems: dict[str, Problem] = {}
    for attention in attentions:
        broken = _broken(attention, tp)
        if broken:
            problems.setdefault(
                broken, Problem("parallel.tp", tp, broken, f"use {possible_degrees(attentions)}")
            )
    refuse(problems.values())


def allows(attentions: Sequence[Attention], tp: int) -> bool:
    """Whether each of `tp` ranks can get complete heads."""
    return not any(_broken(attention, tp) for attention in attentions)


def possible_degrees(attentions: Sequence[Attention]) -> str:
    """`1, 2, 3 or 6`: the degrees that every attention module allows."""
    most = min(
        (attention.heads for attention in attentions if attention.heads is not None), default=1
    )
    degrees = [tp for tp in range(1, most + 1) if allows(attentions, tp)]
    *rest, last = [str(degree) for degree in degrees]
    return f"{', '.join(rest)} or {last}" if rest else last


def _broken(attention: Attention, tp: int) -> str | None:
    heads = attention.heads
    kv_heads = attention.kv_heads
    if heads is None or kv_heads is None:
        return None
    if heads % tp:
        return f"{attention.heads_field} is {heads} and {heads} % {tp} != 0"
    if kv_heads % tp == 0:
        return None
    if attention.fused:
        fused = attention.fused[0].rpartition(".")[2]
        return (
            f"{attention.kv_field} is {kv_heads} and {kv_heads} % {tp} != 0, and {fused} computes"
            " keys together with queries"
        )
    if tp % kv_heads:
        return (
            f"{attention.kv_field} is {kv_heads}, and neither {kv_heads} % {tp} nor {tp} %"
            f" {kv_heads} is 0"
        )
    return None


def _count(module: nn.Module, model: nn.Module, names: tuple[str, ...]) -> tuple[int | None, str]:
    """The first of `names` on the module, its configuration or the model's; with the name that a
    user knows it by.
    """
    text = getattr(model, "config", None)
    if text is not None and hasattr(text, "get_text_config"):
        text = text.get_text_config()
    for owner in (module, getattr(module, "config", None), text):
        for name in names:
            value = _integer(owner, name)
            if value is not None:
                return value, next(
                    (field for field in names if _integer(text, field) == value), name
                )
    return None, names[0]


def _by_width(
    model: nn.Module, keys_values: tuple[str, ...], width: int, counted: int | None
) -> int | None:
    """Key heads by the size of the projection: layers of one model may differ from its
    configuration.
    """
    features = int(getattr(model.get_submodule(keys_values[0]), "out_features", 0))
    if features and features % width == 0:
        return features // width
    return counted


def _integer(owner: object, name: str) -> int | None:
    try:
        value = getattr(owner, name, None)
    # Transformers' answer where the layers of one model differ in it; a layer's own shapes tell
    except RuntimeError:
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
