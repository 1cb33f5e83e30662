"""Replicated parameters inside a split region: their gradients are partial, or their place is
unknown.

Between a column-parallel and a row-parallel layer a rank computes only its own heads or channels. A
norm over one head's width, or an activation with a weight, is applied to those, so its gradient
must be summed over the ranks. For other parameters nothing is known: the rules of a model family
are then replaced by rules that are correct for any layer; a user's rules are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from plait.errors import ModelError
from plait.model.heads import Attention, find_attentions, head_width
from plait.model.layers import is_norm
from plait.model.rules import RuleSet, Style

_GATHERED: dict[Style, Style] = {
    "colwise": "colwise_gather_output",
    "rowwise": "rowwise_split_input",
}


def complete_inner_rules(
    model: nn.Module, styles: dict[str, Style], rule_set: RuleSet, blocks: Sequence[str]
) -> None:
    """Give inner parameters their style, or gather the layers around unknown ones. Changes `styles`
    in place.
    """
    attentions = {attention.name: attention for attention in find_attentions(model, styles)}
    for parent in _split_parts(styles, blocks):
        attention = attentions.get(parent)
        unknown = []
        for name, module in _whole_owners(model, parent, styles):
            if _is_summed(model, name, module, parent, attention):
                styles[name] = "replicated_with_grad_allreduce"
            else:
                unknown.append((name, module))
        own = {style for name, style in styles.items() if name.rpartition(".")[0] == parent}
        if unknown and not rule_set.complete and own >= _GATHERED.keys():
            _gather(styles, parent)
        elif attention is not None:
            for name, module in unknown:
                _refuse_per_head(name, module, attention, rule_set)


def _split_parts(styles: dict[str, Style], blocks: Sequence[str]) -> list[str]:
    """Modules whose own children include layers with split outputs or inputs. A block that owns
    them itself has its norms outside of the split part.
    """
    outside = {"", *blocks}
    parents = (name.rpartition(".")[0] for name, style in styles.items() if style in _GATHERED)
    return [parent for parent in dict.fromkeys(parents) if parent not in outside]


def _whole_owners(
    model: nn.Module, parent: str, styles: dict[str, Style]
) -> Iterator[tuple[str, nn.Module]]:
    """Modules in `parent` that own parameters and have no style, outside of parts that have styled
    layers of their own.
    """
    for name, module in list(model.get_submodule(parent).named_modules(prefix=parent)):
        if name in styles or next(module.parameters(recurse=False), None) is None:
            continue
        nearest = name.rpartition(".")[0] if name != parent else parent
        if nearest == parent or not any(other.startswith(f"{nearest}.") for other in styles):
            yield name, module


def _is_summed(
    model: nn.Module, name: str, module: nn.Module, parent: str, attention: Attention | None
) -> bool:
    own = [parameter for _, parameter in module.named_parameters(recurse=False)]
    if (
        name != parent
        and name.rpartition(".")[2].startswith("act")
        and all(parameter.numel() == 1 for parameter in own)
    ):
        return True
    if attention is None or not is_norm(module) or name.rpartition(".")[0] != parent:
        return False
    width = head_width(model, attention)
    return width is not None and all(tuple(parameter.shape) == (width,) for parameter in own)


def _gather(styles: dict[str, Style], parent: str) -> None:
    """Styles that are right for any layer, for the layers of one part."""
    for name, style in list(styles.items()):
        if not name.startswith(f"{parent}."):
            continue
        if style in _GATHERED and name.rpartition(".")[0] == parent:
            styles[name] = _GATHERED[style]
        elif style == "replicated_with_grad_allreduce":
            del styles[name]  # applied to all heads now, replicated on every rank


def _refuse_per_head(name: str, module: nn.Module, attention: Attention, rule_set: RuleSet) -> None:
    for _, parameter in module.named_parameters(recurse=False):
        if (
            attention.heads is not None
            and attention.heads > 1
            and parameter.ndim > 1
            and parameter.shape[0] == attention.heads
        ):
            raise ModelError(
                f"{rule_set.source}: {name} has weights for each of {attention.heads} heads, but a"
                " rank computes only some of them; use 'colwise_gather_output' and"
                f" 'rowwise_split_input' for the layers of {attention.name}"
            )
