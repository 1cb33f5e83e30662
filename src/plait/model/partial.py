"""Styles of replicated parameters inside a region that tensor parallelism splits.

Note [Replicated parameters in split regions]
    Between a column-parallel and a row-parallel layer, a rank computes only its own heads or
    channels. A norm over the width of one head, or an activation with a weight, is applied to those
    only. Its gradient on a rank is partial and must be summed over the ranks.

    For other parameters in such a region it is not known what they are applied to. If the rules
    come from a model family, the layers around them are gathered instead, which is correct for any
    parameter. A user's rules are applied as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from plait.errors import ModelError
from plait.model.heads import Attention, find_attentions, head_width
from plait.model.layers import is_norm
from plait.model.rules import RuleSet, Style

_GATHERED_STYLES: dict[Style, Style] = {
    "colwise": "colwise_gather_output",
    "rowwise": "rowwise_split_input",
}


def complete_inner_rules(
    model: nn.Module, styles: dict[str, Style], rule_set: RuleSet, blocks: Sequence[str]
) -> None:
    """Decide on the parameters in split regions. See Note [Replicated parameters in split regions].

    Args:
        model: The model without adapters.
        styles: Style by module name. It is changed in place.
        rule_set: The rules that `styles` come from.
        blocks: Names of the repeated blocks.

    Raises:
        ModelError: A user's rules split the heads around a parameter that has a row for each head.
    """
    attentions = {attention.name: attention for attention in find_attentions(model, styles)}
    for region in _split_regions(styles, blocks):
        attention = attentions.get(region)
        unknown = []
        for name, module in _unstyled_owners(model, region, styles):
            if _has_partial_gradients(model, name, module, region, attention):
                styles[name] = "replicated_with_grad_allreduce"
            else:
                unknown.append((name, module))

        child_styles = {
            style for name, style in styles.items() if name.rpartition(".")[0] == region
        }
        if unknown and not rule_set.complete and child_styles >= _GATHERED_STYLES.keys():
            _gather(styles, region)
        elif attention is not None:
            for name, module in unknown:
                _refuse_per_head(name, module, attention, rule_set)


def _split_regions(styles: dict[str, Style], blocks: Sequence[str]) -> list[str]:
    """Return the modules with children whose outputs or inputs are split.

    A block that owns such layers itself is left out, because its norms are outside of the split.
    """
    excluded = {"", *blocks}
    regions: dict[str, None] = {}
    for name, style in styles.items():
        parent = name.rpartition(".")[0]
        if style in _GATHERED_STYLES and parent not in excluded:
            regions[parent] = None
    return list(regions)


def _unstyled_owners(
    model: nn.Module, region: str, styles: dict[str, Style]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a region that own parameters and have no style.

    Modules whose parent inside the region has styled layers are left out.
    """
    # The caller adds styles while it iterates, so `styles` is looked up again for every module.
    for name, module in list(model.get_submodule(region).named_modules(prefix=region)):
        if name in styles or next(module.parameters(recurse=False), None) is None:
            continue
        parent = name.rpartition(".")[0] if name != region else region
        if parent == region or not any(styled.startswith(f"{parent}.") for styled in styles):
            yield name, module


def _has_partial_gradients(
    model: nn.Module, name: str, module: nn.Module, region: str, attention: Attention | None
) -> bool:
    parent, _, leaf = name.rpartition(".")
    parameters = list(module.parameters(recurse=False))
    is_activation = name != region and leaf.startswith("act")
    if is_activation and all(parameter.numel() == 1 for parameter in parameters):
        return True  # a scalar weight, which is applied to this rank's channels
    if attention is None or not is_norm(module) or parent != region:
        return False
    width = head_width(model, attention)
    return width is not None and all(tuple(p.shape) == (width,) for p in parameters)


def _gather(styles: dict[str, Style], region: str) -> None:
    """Replace the styles of a region by styles that are correct for any layer."""
    for name, style in list(styles.items()):
        if not name.startswith(f"{region}."):
            continue
        if style in _GATHERED_STYLES and name.rpartition(".")[0] == region:
            styles[name] = _GATHERED_STYLES[style]
        elif style == "replicated_with_grad_allreduce":
            # It is now applied to all heads, so every rank has the full gradient.
            del styles[name]


def _refuse_per_head(name: str, module: nn.Module, attention: Attention, rule_set: RuleSet) -> None:
    if attention.heads is None or attention.heads < 2:
        return
    for parameter in module.parameters(recurse=False):
        if parameter.ndim > 1 and parameter.shape[0] == attention.heads:
            raise ModelError(
                f"{rule_set.source}: {name} has weights for each of {attention.heads} heads, but a"
                " rank computes only some of them; use 'colwise_gather_output' and"
                f" 'rowwise_split_input' for the layers of {attention.name}"
            )
