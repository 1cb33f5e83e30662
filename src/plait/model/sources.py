"""Sources of the tensor-parallel rules of a model. The first source that has rules is used.

1. The user's `{pattern: style}`.
2. Plait's table of families for which Transformers has no plan, or an incomplete one.
3. Transformers' own plan, read as data. Styles that Plait does not support are errors.
4. A guess from the structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from plait.errors import ModelError
from plait.model.experts import SPLIT_FAMILIES, find_experts
from plait.model.guess import guess_rules
from plait.model.plan_table import table_rules
from plait.model.rules import STYLES, RuleSet, Style, StyleRule, matches
from plait.model.sequence import is_inside
from plait.names import did_you_mean, listed_names

USER_SOURCE = "parallel.plan"
GUESS_SOURCE = "guessed"

_OLD_NAMES: dict[str, Style] = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
}
"""Names of two styles in Transformers before 5.0."""
_NO_STYLE = "replicate"


def rules_for(
    model: nn.Module, *, user: Mapping[str, str] | None = None, blocks: Sequence[str] = ()
) -> RuleSet:
    """Return the rules for a model.

    Args:
        model: The model without adapters.
        user: Style by pattern. If it is given, no other source is used.
        blocks: Names of the repeated blocks, in which a guess looks for layers.

    Raises:
        ModelError: A style is unknown or not supported, or nothing is known about the model and
            nothing can be guessed.
    """
    if user is not None:
        return RuleSet(_user_rules(user), USER_SOURCE, known_counts=True, complete=True)
    rules = table_rules(model) or _transformers_rules(model)
    if rules is not None:
        return rules
    return RuleSet(guess_rules(model, blocks), GUESS_SOURCE, known_counts=True)


def _user_rules(user: Mapping[str, str]) -> tuple[StyleRule, ...]:
    if not user:
        raise ModelError(
            f"{USER_SOURCE} is empty; name at least one module, or leave it out to use the model"
            " family's own plan"
        )
    return tuple(StyleRule(pattern, _user_style(style, pattern)) for pattern, style in user.items())


def _user_style(style: str, pattern: str) -> Style:
    known = _style(style)
    if known is not None:
        return known
    raise ModelError(
        f"{USER_SOURCE}: {pattern!r} has the unknown style {style!r};"
        f" {did_you_mean(style, STYLES)}the styles are {', '.join(STYLES)}"
    )


def _style(name: str) -> Style | None:
    for style in STYLES:
        if name == style:
            return style
    return None


def _transformers_rules(model: nn.Module) -> RuleSet | None:
    """Return the rules of the plans that Transformers collects for its models, or None.

    Transformers combines the plans of a model's class, its configuration and its parts. The plans
    of the outermost of its models inside of `model` are used.
    """
    rules: list[StyleRule] = []
    families: list[str] = []
    for name, module, plan in _models_with_plans(model):
        family = str(getattr(module.config, "model_type", type(module).__name__))
        prefix = f"{name}." if name else ""
        styles = _translate(module, plan, family)
        # A plan of an embedding and a head alone, which Transformers adds to every model, says
        # nothing about the layers.
        if any("*" in pattern for pattern in styles):
            rules += [StyleRule(prefix + pattern, style) for pattern, style in styles.items()]
            families.append(family)
    if not rules:
        return None
    return RuleSet(tuple(rules), f"transformers' plan of {', '.join(families)}", optional=True)


def _models_with_plans(model: nn.Module) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    outermost: list[str] = []
    for name, module in model.named_modules():
        if not hasattr(module, "config") or "" in outermost or is_inside(name, outermost):
            continue
        # The plan must be an attribute of the module itself. A wrapper (PEFT's) forwards unknown
        # attributes, and the names of a plan begin at the model that owns it.
        if "_tp_plan" not in vars(module) and not hasattr(type(module), "_tp_plan"):
            continue
        plan = getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping):
            outermost.append(name)
            yield name, module, plan


def _translate(model: nn.Module, plan: Mapping[str, str], family: str) -> dict[str, Style]:
    """Translate Transformers' styles to Plait's.

    Raises:
        ModelError: A module or parameter has a style that is not supported.
    """
    # Experts are split by parallel.ep or replicated, so their styles in the plan do not matter.
    experts: list[str] = []
    if family in SPLIT_FAMILIES:
        experts = [layer.name for layer in find_experts(model)]
    names = []
    for name, _ in (*model.named_modules(), *model.named_parameters()):
        if name not in experts and not is_inside(name, experts):
            names.append(name)

    styles: dict[str, Style] = {}
    unsupported: dict[str, str] = {}
    for pattern, style in plan.items():
        known = _style(_OLD_NAMES.get(style, style))
        if known is not None:
            styles[pattern] = known
        elif style != _NO_STYLE and any(matches(name, pattern) for name in names):
            unsupported[pattern] = style
    if unsupported:
        styled = [f"{pattern} is {style!r}" for pattern, style in unsupported.items()]
        raise ModelError(
            f"Transformers' plan of {family} has styles that Plait does not apply:"
            f" {listed_names(styled, 3)}; use parallel.tp = 1, or give {USER_SOURCE} with styles"
            " for other layers, which leaves these replicated on every rank"
        )
    return styles
