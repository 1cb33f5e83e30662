"""Whether the blocks of a model can compute on sequence shards, and what their children then do.

Between blocks the hidden states [batch, seq, hidden] are sharded along the sequence. Attention and
MLP all-gather their input, and their row-parallel layers reduce-scatter their output; norms compute
on shards. In families with experts, layers of experts, and an attention that tp does not split, are
computed by every rank on all tokens, and each keeps its own of the output. Any other module with
parameters, or one that mixes tokens outside of attention and MLP, would compute wrong values, so
the model is refused. This is decided from the structure alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from plait._torch.modules import DROPOUTS
from plait.model.experts import SPLIT_FAMILIES, find_experts
from plait.model.layers import is_norm
from plait.model.rules import COLUMN_STYLES, ROW_STYLES, Style

_CROSS_WORDS = ("cross", "encoder_attn", "encoder_attention", "encdec")
_GATHERED: tuple[Style, ...] = ("colwise_gather_output", "rowwise_split_input")
_SECOND_INPUTS = frozenset(
    {
        "k",
        "v",
        "q",
        "key",
        "value",
        "query",
        "memory",
        "context",
        "encoder_hidden_states",
        "key_value_states",
    }
)
_EMBEDDING_NORM_WORDS = ("embed", "emb_", "_pre", "pre_norm")


@dataclass(frozen=True)
class SequenceFacts:
    """`possible` is True or the reason why not. The names are found as far as they exist, whatever
    `possible` says.
    """

    norms: tuple[str, ...]
    regions: tuple[str, ...]
    whole: tuple[str, ...]
    final_norm: str | None
    possible: Literal[True] | str


def is_inside(name: str, owners: Sequence[str]) -> bool:
    """Whether a module or parameter of that full name is below one of the modules."""
    return any(name.startswith(f"{owner}.") for owner in owners)


def sequence_facts(
    model: nn.Module, styles: Mapping[str, Style], blocks: Sequence[str], whole_sequence: str | None
) -> SequenceFacts:
    """Facts for blocks named `blocks` whose modules have `styles`; `whole_sequence` is a reason
    known of the family.
    """
    norms: list[str] = []
    regions: list[str] = []
    whole: list[str] = []
    reasons = [whole_sequence] if whole_sequence else []
    reasons += _model_reasons(model, blocks)
    for block in blocks:
        whole += _whole_parts(model, block, styles)
        _look_at_block(model, block, styles, norms, regions, whole, reasons)
    final = _final_norm(model, blocks)
    if final is not None:
        norms.append(final)
    return SequenceFacts(
        tuple(norms), tuple(regions), tuple(whole), final, reasons[0] if reasons else True
    )


def _model_reasons(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    if not blocks:
        return [
            "the model has no list of repeated blocks between which the sequence could stay sharded"
        ]
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        return ["cross-attention reads a second sequence, which would have to be gathered as well"]
    if len({block.rpartition(".")[0] for block in blocks}) > 1:
        return [
            "the blocks are in several lists"
            f" ({', '.join(sorted({block.rpartition('.')[0] for block in blocks}))})"
        ]
    return []


def _whole_parts(model: nn.Module, block: str, styles: Mapping[str, Style]) -> list[str]:
    """Children of a block, in a family that is compared with one process so, that hold experts, or
    whose layers, if any are split, gather what they compute.
    """
    if getattr(getattr(model, "config", None), "model_type", None) not in SPLIT_FAMILIES:
        return []
    found = []
    for leaf, child in model.get_submodule(block).named_children():
        name = f"{block}.{leaf}"
        inside = [
            style for other, style in styles.items() if other == name or is_inside(other, (name,))
        ]
        has_parts = any(style not in _GATHERED for style in inside)
        if (
            next(child.parameters(), None) is not None
            and not is_norm(child)
            and (find_experts(child) or not has_parts)
        ):
            found.append(name)
    return found


def _look_at_block(
    model: nn.Module,
    block: str,
    styles: Mapping[str, Style],
    norms: list[str],
    regions: list[str],
    whole: Sequence[str],
    reasons: list[str],
) -> None:
    """Sort the children of one block that are not computed on all tokens; adds to `norms`,
    `regions` and `reasons`.
    """
    module = model.get_submodule(block)
    reasons += [
        f"{block} has a parameter of its own, {name}"
        for name, _ in module.named_parameters(recurse=False)
    ]
    crossing = [
        name
        for name, _ in module.named_modules()
        if any(word in name.lower() for word in _CROSS_WORDS)
    ]
    reasons += [
        f"{block}.{name} reads a second sequence, which would have to be gathered as well"
        for name in crossing[:1]
    ]
    own = [style for name, style in styles.items() if name.rpartition(".")[0] == block]
    if ("rowwise" in own or "rowwise_split_input" in own) and not any(
        style in COLUMN_STYLES for style in own
    ):
        reasons.append(f"{block} has a row-split layer without a column-split one before it")
    for leaf, child in module.named_children():
        name = f"{block}.{leaf}"
        if next(child.parameters(), None) is None:
            continue
        if name in styles or name in whole:
            continue
        inside = {inner: style for inner, style in styles.items() if inner.startswith(f"{name}.")}
        if inside:
            regions.append(name)
            reasons += _region_reasons(model, name, inside)
        elif is_norm(child):
            norms += [
                inner
                for inner, part in child.named_modules(prefix=name)
                if next(part.parameters(recurse=False), None) is not None
            ]
        else:
            reasons.append(f"{name} ({type(child).__name__}) is neither a norm nor split over tp")
    dropout = _dropout(module, block)
    gathered = any(
        is_inside(name, (block,))
        for name in (*whole, *(name for name, style in styles.items() if style in _GATHERED))
    )
    if dropout and gathered:
        reasons.append(
            f"{dropout}, and a part of {block} is computed on every rank, on which each would drop"
            " other places"
        )


def _region_reasons(model: nn.Module, region: str, inside: Mapping[str, Style]) -> list[str]:
    """Why the parts of an attention or MLP cannot run between an all-gather of its input and a
    reduce-scatter of its output.
    """
    if not any(style in COLUMN_STYLES for style in inside.values()):
        return [f"{region} has no column-split layer that reads its input"]
    if not any(style in ROW_STYLES for style in inside.values()):
        return [f"{region} has no row-split layer at its end"]
    inputs = [
        p.name
        for p in inspect.signature(model.get_submodule(region).forward).parameters.values()
        if p.default is p.empty
    ]
    second = [name for name in inputs[1:] if name in _SECOND_INPUTS]
    if second:
        return [
            f"{region} takes a second input, {second[0]}, which would have to be gathered as well"
        ]
    gathered = all(style not in ("colwise", "kv_replicated") for style in inside.values())
    reasons = []
    for name, module in model.get_submodule(region).named_modules(prefix=region):
        owned = [leaf for leaf, _ in module.named_parameters(recurse=False)]
        if not owned or name in inside:
            continue
        if (
            gathered
            and is_norm(module)
            and name.rpartition(".")[2].startswith(("q_", "k_", "query_", "key_"))
        ):
            # between a gathered output and a row-split layer: full sequences, replicated on every
            # rank
            continue
        what = (
            f"the parameter {owned[0]}"
            if name == region
            else f"{name[len(region) + 1 :]} ({type(module).__name__})"
        )
        reasons.append(
            f"{region} holds {what}, which is replicated on every rank and may see other tokens"
            " than its neighbours"
        )
    return reasons


def _dropout(module: nn.Module, block: str) -> str | None:
    """The first dropout of a block that is not zero, as `name = p`."""
    for name, part in module.named_modules(prefix=block):
        if isinstance(part, DROPOUTS) and part.p > 0:
            return f"{name} drops with p = {part.p}"
        for attribute, value in vars(part).items():
            if "drop" in attribute and isinstance(value, float) and value > 0:
                return f"{name}.{attribute} = {value}"
    return None


def _final_norm(model: nn.Module, blocks: Sequence[str]) -> str | None:
    """The one norm next to the list of blocks, if it is one."""
    if not blocks:
        return None
    owner = blocks[0].rpartition(".")[0].rpartition(".")[0]
    found = []
    for leaf, child in model.get_submodule(owner).named_children():
        if (
            is_norm(child)
            and next(child.parameters(), None) is not None
            and not any(word in leaf.lower() for word in _EMBEDDING_NORM_WORDS)
        ):
            found.append(f"{owner}.{leaf}" if owner else leaf)
    return found[0] if len(found) == 1 else None
