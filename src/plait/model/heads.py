"""Attention heads of a model, and the degrees of tensor parallelism that can split them.

Note [Heads per rank]
    A rank of tp computes complete heads. The number of query heads must be divisible by the degree.
    The number of key-value heads must be divisible by the degree, or divide it. In the latter case
    the key and value projections are replicated, and each rank computes the head that its queries
    use.

Everything is derived from attributes and shapes; the values of weights are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from plait.errors import Problem, raise_problems
from plait.model.layers import Style

HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "num_q_heads",
    "n_local_heads",
)
"""Attributes of modules that count heads, or query heads."""
KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_kv_head",
    "kv_heads",
    "n_local_kv_heads",
)
"""Attributes of modules that count key-value heads."""
GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
"""Attributes of modules that count query heads per key-value head."""
WIDTHS = (
    "head_dim",
    "head_size",
    "attention_head_size",
    "d_head",
    "dim_head",
    "hidden_size_per_attention_head",
)
"""Attributes of modules with the width of a head."""

QUERY_NAMES = frozenset(
    {"q_proj", "query", "q", "wq", "to_q", "q_lin", "query_proj", "linear_q", "q_linear"}
)
"""Usual names of query projections."""
KEY_VALUE_NAMES = frozenset(
    {"k_proj", "v_proj", "key", "value", "k", "v", "wk", "wv", "to_k", "to_v", "k_lin", "v_lin"}
    | {"key_proj", "value_proj", "linear_k", "linear_v", "k_linear", "v_linear"}
)
"""Usual names of key and value projections."""
FUSED_NAMES = frozenset(
    {"query_key_value", "qkv_proj", "qkv", "c_attn", "Wqkv", "wqkv", "in_proj", "to_qkv"}
    | {"qkv_linear"}
)
"""Usual names of projections to queries, keys and values."""


@dataclass(frozen=True)
class Attention:
    """Module that owns split projections of attention heads."""

    name: str
    heads: int | None
    """Number of query heads, or None if the model does not define it."""
    kv_heads: int | None
    """Number of key-value heads, or None if the model does not define it."""
    heads_field: str
    """Name of the attribute or configuration field of `heads`, for messages."""
    kv_field: str
    """Name of the attribute or configuration field of `kv_heads`, for messages."""
    columns: tuple[str, ...]
    """Full names of the column-split layers."""
    keys_values: tuple[str, ...]
    """Column-split layers that compute only keys or values."""
    fused: tuple[str, ...]
    """Column-split layers that compute queries, keys and values, head after head."""


def find_attentions(model: nn.Module, styles: Mapping[str, Style]) -> tuple[Attention, ...]:
    """Return the modules with attention projections whose outputs stay split.

    Args:
        model: The model without adapters.
        styles: Style by module name.
    """
    children: dict[str, list[str]] = {}
    for name, style in styles.items():
        if style in ("colwise", "kv_replicated"):
            children.setdefault(name.rpartition(".")[0], []).append(name)
    attentions: list[Attention] = []
    for parent, columns in children.items():
        if _is_attention(model.get_submodule(parent), columns):
            attentions.append(_attention(model, parent, columns))
    return tuple(attentions)


def _is_attention(module: nn.Module, columns: Sequence[str]) -> bool:
    projection_names = QUERY_NAMES | KEY_VALUE_NAMES | FUSED_NAMES
    if any(name.rpartition(".")[2] in projection_names for name in columns):
        return True
    if len(columns) >= 3 and count_attributes(module):
        return True
    return "attention" in type(module).__name__.lower()


def _attention(model: nn.Module, parent: str, columns: Sequence[str]) -> Attention:
    module = model.get_submodule(parent)
    keys_values = []
    fused = []
    for name in columns:
        leaf = name.rpartition(".")[2]
        if leaf in KEY_VALUE_NAMES:
            keys_values.append(name)
        if leaf in FUSED_NAMES:
            fused.append(name)

    # Attributes of the layer come first: layers of one model may have different numbers of heads.
    heads, heads_field = _find_count(module, model, HEADS)
    kv_heads, kv_field = _find_count(module, model, KV_HEADS)
    width = _find_count(module, model, WIDTHS)[0]
    if keys_values and width:
        # The layers of one model may differ from its configuration, so the projection decides.
        features = int(getattr(model.get_submodule(keys_values[0]), "out_features", 0))
        if features and features % width == 0:
            kv_heads = features // width
    if kv_heads is None and heads is not None:
        # A layer that reads the keys of another layer has no projection of its own.
        groups = _find_count(module, model, GROUPS)[0]
        if groups is not None:
            kv_heads = heads // groups
    if kv_heads is None:
        kv_heads = heads
        kv_field = heads_field
    return Attention(
        parent,
        heads,
        kv_heads,
        heads_field,
        kv_field,
        tuple(columns),
        tuple(keys_values),
        tuple(fused),
    )


def head_width(model: nn.Module, attention: Attention) -> int | None:
    """Return the width of a head, or None if it is unknown.

    It is read from attributes, or computed from the size of the query projection.
    """
    width = _find_count(model.get_submodule(attention.name), model, WIDTHS)[0]
    queries = [name for name in attention.columns if name.rpartition(".")[2] in QUERY_NAMES]
    if width is not None or attention.heads is None or not queries:
        return width
    features = int(getattr(model.get_submodule(queries[0]), "out_features", 0))
    return features // attention.heads or None


def count_attributes(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's attributes that count heads, by their usual names."""
    return tuple(
        name for name in (*HEADS, *KV_HEADS, *GROUPS) if _positive_integer(module, name) is not None
    )


def local_count(attention: Attention, attribute: str, tp: int) -> int | None:
    """Return the value of a head-counting attribute on one rank.

    Args:
        attention: The attention module.
        attribute: One of `count_attributes`.
        tp: Degree of tensor parallelism.

    Returns:
        The value, or None if the number of heads is unknown.
    """
    if attention.heads is None or attention.kv_heads is None:
        return None
    heads = attention.heads // tp
    # Replicated key-value projections compute one head per rank.
    kv_heads = max(1, attention.kv_heads // tp)
    if attribute in GROUPS:
        return heads // kv_heads
    return kv_heads if attribute in KV_HEADS else heads


def replicates_keys(attention: Attention, tp: int) -> bool:
    """Return True if there are fewer key-value heads than ranks. See Note [Heads per rank]."""
    return (
        attention.kv_heads is not None and attention.kv_heads < tp and bool(attention.keys_values)
    )


def check_heads(attentions: Sequence[Attention], tp: int) -> None:
    """Check that every rank receives complete heads. See Note [Heads per rank].

    Raises:
        ConfigError: A head would be split. The error lists all violated rules and the possible
            degrees.
    """
    problems: dict[str, Problem] = {}
    for attention in attentions:
        rule = _violated_rule(attention, tp)
        if rule:
            remedy = f"use {possible_degrees(attentions)}"
            problems.setdefault(rule, Problem("parallel.tp", tp, rule, remedy))
    raise_problems(problems.values())


def allows(attentions: Sequence[Attention], tp: int) -> bool:
    """Return True if every one of `tp` ranks can get complete heads."""
    return not any(_violated_rule(attention, tp) for attention in attentions)


def possible_degrees(attentions: Sequence[Attention]) -> str:
    """Return the degrees that all attention modules allow, as text: `1, 2, 3 or 6`."""
    head_counts = [attention.heads for attention in attentions if attention.heads is not None]
    largest = min(head_counts, default=1)
    *degrees, last = [str(tp) for tp in range(1, largest + 1) if allows(attentions, tp)]
    if not degrees:
        return last
    return f"{', '.join(degrees)} or {last}"


def _violated_rule(attention: Attention, tp: int) -> str | None:
    """Return the rule of Note [Heads per rank] that a degree violates, or None."""
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


def _find_count(
    module: nn.Module, model: nn.Module, names: tuple[str, ...]
) -> tuple[int | None, str]:
    """Find the first of the attributes `names` that is a positive integer.

    The module is searched first, then its configuration, then the configuration of the model.

    Returns:
        (value, name to show to users). If a field of the model's configuration has the same value,
        the name is that of the field, otherwise that of the attribute.
    """
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()

    for owner in (module, getattr(module, "config", None), config):
        for name in names:
            value = _positive_integer(owner, name)
            if value is None:
                continue
            for field in names:
                if _positive_integer(config, field) == value:
                    return value, field
            return value, name
    return None, names[0]


def _positive_integer(owner: object, name: str) -> int | None:
    try:
        value = getattr(owner, name, None)
    except RuntimeError:
        # Transformers raises this if the layers differ in the value. Their shapes are used instead.
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return None
    return value
