"""Rules that shrink a configuration or model such that a layout splits it like the original.

Sizes shrink. Properties that determine the code path do not change. These are the divisibility of
heads, key-value heads, widths and the vocabulary by each degree of the layout, the kind of
attention (grouped or multi-query), the kinds of layers, and the number of experts per token. The
report lists every change. The rules are arithmetic on a dictionary, and `verify.choose` checks that
the resulting model runs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from torch import nn

from plait.cluster.layout import Layout
from plait.sizes import is_count, is_integer

Fields = dict[str, Any]

DEPTH = 2
"""Number of blocks, unless the layout or different kinds of layers need more."""
HEAD_SIZES = (8, 16, 32, 64)
"""Head sizes in the order in which they are tried.

Small ones fail for models that rotate a fraction of the head.
"""
VOCABULARY = 96
SPREAD = 0.1
"""Standard deviation of initial weights.

In narrow layers the usual 0.02 makes attention uniform, and the gradients of queries and keys
become too small to show an error.
"""

_DEPTH = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "decoder_layers",
    "num_decoder_layers",
)
_OTHER_DEPTHS = ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers")
_HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "decoder_attention_heads",
    "num_decoder_attention_heads",
    "num_heads",
)
_OTHER_HEADS = ("encoder_attention_heads", "num_encoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "emb_dim")
_SAME_AS_HIDDEN = ("word_embed_proj_dim", "attention_hidden_size", "embedding_size", "lru_width")
_INNER = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "intermediate_size_mlp",
    "decoder_ffn_dim",
    "encoder_ffn_dim",
    "dff",
    "dim_ff",
    "d_inner",
    "feed_forward_size",
)
_EXPERT_INNER = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "expert_ffn_hidden_size",
)
_HEAD_SIZE = (
    "head_dim",
    "qk_head_dim",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "rotary_dim",
    "dim_head",
    "d_head",
)
_RANKS = ("q_lora_rank", "kv_lora_rank")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k")
_STATE_HEADS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
_STATE_HEAD_SIZE = ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
_EXPAND = ("mamba_expand", "expand")
_STATE_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_CHUNKS = ("chunk_size", "mamba_chunk_size")
"""Fields with the chunk length of a scan. Sequences are padded to multiples of it."""
_GROUPS = ("n_group", "num_expert_group")
_WINDOWS = ("sliding_window", "attention_window_size")
_FIRST_LAYERS = ("first_k_dense_replace",)
_WIDTH_IN_HEADS = 4
"""Hidden size of a narrow model without attention heads, as a multiple of the head size."""
_SPREADS = ("initializer_range", "init_std")


@dataclass(frozen=True)
class FieldChange:
    """Change of one field of a Transformers configuration: its name, old value and new value."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name} {_abbreviate(self.before)} -> {_abbreviate(self.after)}"


def _abbreviate(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{len(value)} entries]"
    return str(value)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    """Return the fields that differ between two configurations, in the order of the configuration.

    The name of a nested field is its path, such as `text_config.hidden_size`.
    """
    result: list[FieldChange] = []
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            result += [replace(c, name=f"{name}.{c.name}") for c in changes(old, value)]
        elif old != value:
            result.append(FieldChange(name, old, value))
    return tuple(result)


def _in_parts(fields: Mapping[str, Any], change: Callable[[Fields], Fields]) -> Fields:
    """Return a copy of a configuration with `change` applied to its nested configurations.

    Nested configurations are `text_config`, `vision_config`, `decoder` and other fields with a
    model type. Those for which `change` raises ValueError stay the same.
    """
    result = copy.deepcopy(dict(fields))
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            # A part without a hidden size stays as it is.
            with suppress(ValueError):
                result[name] = change(result[name])
    return result


def depth_of(fields: Mapping[str, Any]) -> int | None:
    """Return the number of layers of a language model or of a multimodal model's text model.

    The result is None if the configuration has no field for the number of layers.
    """
    name = _present(fields, _DEPTH)
    if name is None and isinstance(fields.get("text_config"), dict):
        return depth_of(fields["text_config"])
    return fields[name] if name else None


def kinds_of_layers(fields: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return the kind of every layer. Each kind is a tuple.

    The tuple has the layer's entries of all fields with one entry per layer, such as `layer_types`.
    Layers with equal tuples are of the same kind.
    """
    depth = depth_of(fields) or 0
    kinds: list[tuple[Any, ...]] = [() for _ in range(depth)]
    for value in fields.values():
        if isinstance(value, list | tuple) and len(value) == depth > 1:
            entries = [tuple(entry) if isinstance(entry, list) else entry for entry in value]
        elif _is_by_layer(value):
            by_index = {int(key): str(entry) for key, entry in value.items()}
            entries = [by_index.get(index) for index in range(depth)]
        else:
            continue
        kinds = [(*kind, entry) for kind, entry in zip(kinds, entries, strict=True)]
    return kinds


def _is_by_layer(value: Any) -> bool:
    """Return True if a field maps layer indices to settings, as `per_layer_config` does."""
    if not isinstance(value, dict) or not value:
        return False
    return all(str(key).isdigit() and isinstance(entry, dict) for key, entry in value.items())


def with_depth(fields: Mapping[str, Any], depth: int) -> Fields:
    """Return the configuration with `depth` layers, or more if there are more kinds of layers.

    The first layer of each kind stays.
    """
    name = _present(fields, _DEPTH)
    before = depth_of(fields)
    result = _in_parts(fields, lambda part: with_depth(part, depth))
    if name is None or before is None:
        return result
    kinds = kinds_of_layers(fields)
    first_of_kinds = {kinds.index(kind) for kind in kinds}
    # Layers of every kind come first; the remaining ones fill up to the depth.
    others = [index for index in range(before) if index not in first_of_kinds]
    more = max(0, depth - len(first_of_kinds))
    layers = sorted(first_of_kinds.union(others[:more]))
    result[name] = len(layers)
    for field, value in fields.items():
        if isinstance(value, list | tuple) and len(value) == before > 1:
            result[field] = [value[index] for index in layers]
        elif _is_by_layer(value):
            by_index = {int(key): entry for key, entry in value.items()}
            result[field] = {
                str(new): by_index[old] for new, old in enumerate(layers) if old in by_index
            }
        elif field in _OTHER_DEPTHS and isinstance(value, int) and field != name:
            result[field] = min(value, result[name])
        elif field in _FIRST_LAYERS and isinstance(value, int):
            result[field] = min(value, 1)
        elif field == "mlp_only_layers" and value:
            result[field] = [index for index in value if index < len(layers)]
    return result


def with_width(fields: Mapping[str, Any], layout: Layout, *, head_size: int) -> Fields:
    """Return the configuration with narrower layers, also in its nested configurations.

    Args:
        fields: The configuration.
        layout: The layout. Sizes that are divisible by its degrees stay divisible.
        head_size: Elements of an attention head.

    Raises:
        ValueError: The configuration has no hidden size.
    """
    result = _in_parts(fields, lambda part: with_width(part, layout, head_size=head_size))
    hidden = _present(fields, _HIDDEN)
    heads = _present(fields, _HEADS)
    if hidden is None:
        if result == fields:
            raise ValueError("the configuration has no hidden_size")
        return result
    if heads is None:
        return _without_heads(fields, result, hidden, layout, head_size * _WIDTH_IN_HEADS)

    degrees = _degrees(layout.tp, layout.cp)
    all_degrees = _degrees(layout.tp, layout.cp, layout.dp_shard, layout.dp)
    for name in _OTHER_HEADS:
        if fields.get(name) == fields[heads]:
            result[name] = shrink_heads(fields[heads], fields[heads], degrees)[0]
    # A model without the field has as many key-value heads as heads.
    kv = _present(fields, _KV_HEADS) or heads
    result[heads], kv_heads = shrink_heads(fields[heads], fields[kv], degrees)
    if kv != heads:
        result[kv] = kv_heads

    old_head_size = fields[hidden] // fields[heads]
    if _present(fields, _HEAD_SIZE) == "head_dim":
        old_head_size = fields["head_dim"]
    _change(
        fields, result, _HEAD_SIZE, lambda size: max(2, size * head_size // old_head_size // 2 * 2)
    )
    result[hidden] = result[heads] * head_size
    # Where heads do not fill the hidden size, they must not fill the small one either.
    if fields[hidden] != fields[heads] * old_head_size:
        result[hidden] = like(fields[hidden], result[hidden] + 8, (*all_degrees, 8))
    _lower(fields, result, _INNER, 2 * result[hidden], all_degrees)
    _lower(fields, result, _EXPERT_INNER, result[hidden] // 2, all_degrees)
    _lower(fields, result, _RANKS, 16, all_degrees)
    for layers in filter(_is_by_layer, result.values()):
        for entry in layers.values():
            for key, value in entry.items():
                entry[key] = _as_before(value, fields.get(key), result.get(key))
    _follow_hidden(fields, result, hidden)
    _shrink_state_space(fields, result, hidden, head_size)
    _shrink_experts(fields, result, degrees)
    return result


def _lower(
    fields: Mapping[str, Any],
    result: Fields,
    names: Iterable[str],
    target: int,
    degrees: Sequence[int],
) -> None:
    """Set fields to the smallest number >= `target` that the same `degrees` divide as before."""
    _change(fields, result, names, lambda size: min(size, like(size, target, degrees)))


def _without_heads(
    fields: Mapping[str, Any], result: Fields, hidden: str, layout: Layout, width: int
) -> Fields:
    """Return the narrow configuration of a model without attention, such as a state space model."""
    degrees = (*_degrees(layout.tp, layout.cp, layout.dp_shard, layout.dp), 8)
    result[hidden] = min(fields[hidden], like(fields[hidden], width, degrees))
    _change(fields, result, _INNER, lambda size: min(size, size * result[hidden] // fields[hidden]))
    _follow_hidden(fields, result, hidden)
    return result


def _shrink_state_space(
    fields: Mapping[str, Any], result: Fields, hidden: str, head_size: int
) -> None:
    """Shrink the heads of a state space layer, whose total width is `expand` x hidden."""
    # `num_heads` and `head_dim` can also be those of attention, so the widths decide.
    for heads, size, expand in product(_STATE_HEADS, _STATE_HEAD_SIZE, _EXPAND):
        if not all(isinstance(fields.get(name), int) for name in (heads, size, expand)):
            continue
        if fields[heads] * fields[size] == fields[expand] * fields[hidden]:
            result[size] = head_size
            result[heads] = fields[expand] * result[hidden] // head_size
            for name in _STATE_GROUPS:
                if isinstance(fields.get(name), int) and fields[name] > 1:
                    result[name] = 2 if result[heads] % 2 == 0 else 1


def _follow_hidden(fields: Mapping[str, Any], result: Fields, hidden: str) -> None:
    for name in _SAME_AS_HIDDEN:
        if fields.get(name) == fields[hidden]:
            result[name] = result[hidden]


def _as_before(value: Any, before: Any, after: Any) -> Any:
    """Return a size that some layers override, scaled by the ratio `after` / `before`."""
    if not all(map(is_count, (value, before, after))):
        return value
    return max(1, value * after // before)


def _shrink_experts(fields: Mapping[str, Any], result: Fields, degrees: Sequence[int]) -> None:
    name = _present(fields, _EXPERTS)
    per_token = _present(fields, _PER_TOKEN)
    is_grouped = any(fields.get(group, 1) not in (None, 1) for group in _GROUPS)
    if name is not None and per_token is not None and not is_grouped:
        # More experts than a token uses, so that routing chooses.
        target = max(4, 2 * fields[per_token])
        result[name] = min(fields[name], like(fields[name], target, degrees))


def with_small_vocabulary(fields: Mapping[str, Any], layout: Layout) -> Fields:
    """Return the configuration with a small vocabulary, short attention windows and no dropout.

    The windows are shorter than the samples of the verification.
    """
    result = _in_parts(fields, lambda part: with_small_vocabulary(part, layout))
    if isinstance(fields.get("vocab_size"), int):
        degrees = _degrees(layout.tp, layout.dp_shard, layout.dp)
        size = min(fields["vocab_size"], like(fields["vocab_size"], VOCABULARY, degrees))
        result["vocab_size"] = size
        if isinstance(fields.get("vocab_size_per_layer_input"), int):
            result["vocab_size_per_layer_input"] = size
        for name, value in fields.items():
            if name.endswith("_token_id"):
                result[name] = _small_token(value, size)
    _change(fields, result, _WINDOWS, lambda size: min(size, 4))
    _change(fields, result, _CHUNKS, lambda size: min(size, 8))
    for name, value in fields.items():
        if name in _SPREADS and isinstance(value, float):
            result[name] = max(value, SPREAD)
        elif "drop" in name and isinstance(value, float | int) and value > 0 and value is not True:
            # A field such as `use_dropout` is not a probability.
            result[name] = 0.0
    return result


def _change(
    fields: Mapping[str, Any], result: Fields, names: Iterable[str], change: Callable[[int], int]
) -> None:
    """Apply `change` to those integer fields of `names` that the configuration has."""
    for name in names:
        if isinstance(fields.get(name), int):
            result[name] = change(fields[name])


def _small_token(value: Any, size: int) -> Any:
    if isinstance(value, list):
        return [_small_token(entry, size) for entry in value]
    if isinstance(value, int) and value >= size:
        return value % size
    return value


def like(value: int, target: int, degrees: Iterable[int]) -> int:
    """Return the smallest number >= `target` that is divisible by the same `degrees` as `value`."""
    degrees = tuple(degrees)
    # The pattern of divisibility repeats after the product of the degrees.
    least = max(target, 1)
    for candidate in range(least, least + prod(set(degrees)) + 1):
        if all((candidate % degree == 0) == (value % degree == 0) for degree in degrees):
            return candidate
    return value


def shrink_heads(heads: int, kv_heads: int, degrees: Sequence[int]) -> tuple[int, int]:
    """Return the smallest numbers of heads and key-value heads with the same split over ranks.

    For each of `degrees`, three properties stay the same: whether it divides the numbers of heads,
    whether key-value heads are replicated, and whether a rank has none, one or several heads.
    """

    def split(h: int, k: int) -> tuple[Any, ...]:
        per_degree = []
        for d in degrees:
            divisible = (h % d == 0, k % d == 0, d % k == 0)
            # Whether a rank has none, one or several heads.
            per_degree.append((*divisible, min(h // d, 2), min(k // d, 2)))
        return (h == k, k == 1, h % k == 0, per_degree)

    expected = split(heads, kv_heads)
    for h in range(min(heads, 4), heads + 1):
        for k in range(min(kv_heads, 2), min(kv_heads, h) + 1):
            if split(h, k) == expected:
                return h, k
    return heads, kv_heads


def _degrees(*degrees: int) -> tuple[int, ...]:
    return tuple(sorted({degree for degree in degrees if degree > 1}))


def _present(fields: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the first of `names` whose field is an integer, or None."""
    return next((name for name in names if is_integer(fields.get(name))), None)


def cut_blocks(model: nn.Module, blocks: Sequence[str], depth: int) -> int | None:
    """Truncate the list of blocks of a model to `depth` blocks, in place.

    Returns:
        The previous number of blocks. None if nothing was truncated, because the blocks are not in
        one list or there are at most `depth`.
    """
    owners = {name.rpartition(".")[0] for name in blocks}
    if len(owners) != 1 or len(blocks) <= depth:
        return None
    container = model.get_submodule(owners.pop())
    if not isinstance(container, nn.ModuleList | nn.Sequential):
        return None
    del container[depth:]
    return len(blocks)


_RANDOM = re.compile(r"(drop|dropout|drop_prob|drop_path)$")
_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def without_dropout(model: nn.Module) -> int:
    """Set all dropout probabilities in a model to 0, in place, and return how many there are.

    These are the probabilities of torch's dropout layers, and attributes such as `dropout` or
    `drop_path`.
    """
    count = 0
    for module in model.modules():
        for name, value in list(vars(module).items()):
            named = _RANDOM.search(name) or (name == "p" and isinstance(module, _DROPOUTS))
            if named and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                count += 1
    return count
