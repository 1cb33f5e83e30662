"""Analysis of whether the blocks of a model can compute on sequence shards.

Note [Sequence parallelism]
    Between blocks, the hidden states [batch, seq, hidden] are sharded along the sequence. Attention
    and MLP all-gather their input, and their row-parallel layers reduce-scatter the output. Norms
    compute on shards.

    In families with experts, every rank computes the expert layers on all tokens, and likewise any
    attention that tp does not split. Each rank keeps its own tokens of the output.

    Any other module with parameters, and any module that mixes tokens outside attention and MLP,
    would compute wrong values. Such a model is not supported. The structure of the model decides
    this.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from plait._torch.modules import DROPOUTS
from plait.model.experts import SPLIT_FAMILIES, find_experts
from plait.model.layers import COLUMN_STYLES, ROW_STYLES, Style, is_norm

_CROSS_ATTENTION_PARTS = ("cross", "encoder_attn", "encoder_attention", "encdec")
"""Parts of the names of modules that read a second sequence."""
_GATHERED_STYLES: tuple[Style, ...] = ("colwise_gather_output", "rowwise_split_input")
_SECOND_INPUTS = frozenset(
    {"k", "v", "q", "key", "value", "query", "memory", "context", "encoder_hidden_states"}
    | {"key_value_states"}
)
"""Names of arguments that are a second sequence."""
_EMBEDDING_NORM_PARTS = ("embed", "emb_", "_pre", "pre_norm")
"""Parts of the names of norms before the first block."""
_QUERY_KEY_PREFIXES = ("q_", "k_", "query_", "key_")


@dataclass
class SequenceFacts:
    """Roles of modules under sequence parallelism, collected block by block.

    The fields have the same meaning as in `TensorPlan`. If the model is not supported, they still
    contain the names that are known.
    """

    norms: list[str] = field(default_factory=list)
    regions: list[str] = field(default_factory=list)
    all_token_modules: list[str] = field(default_factory=list)
    final_norm: str | None = None
    reasons: list[str] = field(default_factory=list)
    """Reasons why sequence parallelism is not possible; empty if it is."""


def is_inside(name: str, owners: Sequence[str]) -> bool:
    """Return True if the module or parameter `name` is below one of the modules `owners`."""
    return any(name.startswith(f"{owner}.") for owner in owners)


def sequence_facts(
    model: nn.Module,
    styles: Mapping[str, Style],
    blocks: Sequence[str],
    full_sequence_reason: str | None,
) -> SequenceFacts:
    """Determine the roles of modules under sequence parallelism.

    See Note [Sequence parallelism].

    Args:
        model: The model without adapters.
        styles: Style by module name.
        blocks: Names of the repeated blocks.
        full_sequence_reason: Known reason why the family needs full sequences.
    """
    facts = SequenceFacts(final_norm=_final_norm(model, blocks))
    if full_sequence_reason:
        facts.reasons.append(full_sequence_reason)
    facts.reasons += _reasons_of_model(model, blocks)
    for block in blocks:
        facts.all_token_modules += _all_token_children(model, block, styles)
        _classify_children(model, block, styles, facts)
    if facts.final_norm is not None:
        facts.norms.append(facts.final_norm)
    return facts


def _reasons_of_model(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    if not blocks:
        return [
            "the model has no list of repeated blocks between which the sequence could stay sharded"
        ]
    config = getattr(model, "config", None)
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    if is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return ["cross-attention reads a second sequence, which would have to be gathered as well"]
    lists = {block.rpartition(".")[0] for block in blocks}
    if len(lists) > 1:
        return [f"the blocks are in several lists ({', '.join(sorted(lists))})"]
    return []


def _all_token_children(model: nn.Module, block: str, styles: Mapping[str, Style]) -> list[str]:
    """Return the children of a block that every rank computes on all tokens.

    They hold experts, or all of their split layers gather the output. The result is empty for
    families that no test compares with a single process.
    """
    if getattr(getattr(model, "config", None), "model_type", None) not in SPLIT_FAMILIES:
        return []
    names = []
    for leaf, child in model.get_submodule(block).named_children():
        if is_norm(child) or next(child.parameters(), None) is None:
            continue
        name = f"{block}.{leaf}"
        stays_split = False
        for styled, style in styles.items():
            if (styled == name or is_inside(styled, (name,))) and style not in _GATHERED_STYLES:
                stays_split = True
        if find_experts(child) or not stays_split:
            names.append(name)
    return names


def _classify_children(
    model: nn.Module, block: str, styles: Mapping[str, Style], facts: SequenceFacts
) -> None:
    """Add to `facts` the norms and regions of one block, and reasons why it cannot be sharded."""
    module = model.get_submodule(block)
    facts.reasons += _reasons_of_block(module, block, styles)
    for leaf, child in module.named_children():
        name = f"{block}.{leaf}"
        if (
            next(child.parameters(), None) is None
            or name in styles
            or name in facts.all_token_modules
        ):
            continue
        inside = {inner: style for inner, style in styles.items() if is_inside(inner, (name,))}
        if inside:
            facts.regions.append(name)
            facts.reasons += _reasons_of_region(model, name, inside)
        elif is_norm(child):
            for inner, submodule in child.named_modules(prefix=name):
                if next(submodule.parameters(recurse=False), None) is not None:
                    facts.norms.append(inner)
        else:
            facts.reasons.append(
                f"{name} ({type(child).__name__}) is neither a norm nor split over tp"
            )

    # Ranks that compute the same values would drop different elements of them.
    dropout = _first_dropout(module, block)
    gathered = [name for name, style in styles.items() if style in _GATHERED_STYLES]
    if dropout and any(is_inside(name, (block,)) for name in (*facts.all_token_modules, *gathered)):
        facts.reasons.append(
            f"{dropout}, and a part of {block} is computed on every rank, where each rank would"
            " drop different elements"
        )


def _reasons_of_block(module: nn.Module, block: str, styles: Mapping[str, Style]) -> list[str]:
    """Return the reasons why a block as a whole cannot compute on sequence shards."""
    reasons = []
    for name, _ in module.named_parameters(recurse=False):
        reasons.append(f"{block} has a parameter of its own, {name}")
    for name, _ in module.named_modules():
        if any(part in name.lower() for part in _CROSS_ATTENTION_PARTS):
            reasons.append(
                f"{block}.{name} reads a second sequence, which would have to be gathered as well"
            )
            break
    child_styles = {style for name, style in styles.items() if name.rpartition(".")[0] == block}
    if child_styles.intersection(ROW_STYLES) and not child_styles.intersection(COLUMN_STYLES):
        reasons.append(f"{block} has a row-split layer without a column-split one before it")
    return reasons


def _reasons_of_region(model: nn.Module, region: str, inside: Mapping[str, Style]) -> list[str]:
    """Return why a region cannot run between an all-gather and a reduce-scatter.

    Args:
        model: The model.
        region: Name of an attention or MLP.
        inside: Styles of the modules inside it.
    """
    styles = set(inside.values())
    if styles.isdisjoint(COLUMN_STYLES):
        return [f"{region} has no column-split layer that reads its input"]
    if styles.isdisjoint(ROW_STYLES):
        return [f"{region} has no row-split layer at its end"]

    parameters = inspect.signature(model.get_submodule(region).forward).parameters.values()
    inputs = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    second = [name for name in inputs[1:] if name in _SECOND_INPUTS]
    if second:
        return [
            f"{region} takes a second input, {second[0]}, which would have to be gathered as well"
        ]

    all_gathered = styles.isdisjoint(("colwise", "kv_replicated"))
    reasons = []
    for name, module in model.get_submodule(region).named_modules(prefix=region):
        owned = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        if not owned or name in inside:
            continue
        is_query_key_norm = is_norm(module) and name.rpartition(".")[2].startswith(
            _QUERY_KEY_PREFIXES
        )
        if all_gathered and is_query_key_norm:
            # Between a gathered output and a row-split layer every rank has full sequences.
            continue
        what = f"{name[len(region) + 1 :]} ({type(module).__name__})"
        if name == region:
            what = f"the parameter {owned[0]}"
        reasons.append(
            f"{region} holds {what}, which is replicated on every rank and may see other tokens"
            " than its neighbours"
        )
    return reasons


def _first_dropout(module: nn.Module, block: str) -> str | None:
    """Return a description of the first dropout of a block with p > 0, or None."""
    for name, submodule in module.named_modules(prefix=block):
        if isinstance(submodule, DROPOUTS) and submodule.p > 0:
            return f"{name} drops with p = {submodule.p}"
        for attribute, value in vars(submodule).items():
            if "drop" in attribute and isinstance(value, float) and value > 0:
                return f"{name}.{attribute} = {value}"
    return None


def _final_norm(model: nn.Module, blocks: Sequence[str]) -> str | None:
    """Return the only norm next to the list of blocks, or None if there is not exactly one."""
    if not blocks:
        return None
    # The blocks are `owner.list.index`.
    owner = blocks[0].rpartition(".")[0].rpartition(".")[0]
    names = []
    for leaf, child in model.get_submodule(owner).named_children():
        if not is_norm(child) or next(child.parameters(), None) is None:
            continue
        if not any(part in leaf.lower() for part in _EMBEDDING_NORM_PARTS):
            names.append(f"{owner}.{leaf}".removeprefix("."))
    return names[0] if len(names) == 1 else None
