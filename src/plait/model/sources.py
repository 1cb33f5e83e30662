"""Where the rules for a model come from: the first source that has some.

The user's `{pattern: style}`; Plait's table of families for which Transformers has no plan;
Transformers' own plan, read as data, with the styles that Plait does not apply refused by name; a
guess from the structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches

from torch import nn

from plait.errors import ModelError
from plait.model.experts import SPLIT_FAMILIES, find_experts
from plait.model.guess import guess_rules
from plait.model.plan_table import table_rules
from plait.model.rules import STYLES, Rule, RuleSet, Style, matches

USER_SOURCE = "parallel.plan"
GUESS_SOURCE = "guessed"

_OLD_NAMES: dict[str, Style] = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
}
"""What Transformers called two styles until 5.0."""
_NO_STYLE = "replicate"


def rules_for(
    model: nn.Module, *, user: Mapping[str, str] | None = None, blocks: Sequence[str] = ()
) -> RuleSet:
    """The rules for `model`.

    `user` is used alone when given. `blocks` (see `find_blocks`) is where a guess looks. Raises
    ModelError for an unknown style, a style of Transformers that Plait does not apply, or a model
    about which nothing is known or guessed.
    """
    if user is not None:
        return RuleSet(_user_rules(user), USER_SOURCE, known_counts=True, complete=True)
    found = table_rules(model) or _transformers_rules(model)
    return found or RuleSet(guess_rules(model, blocks), GUESS_SOURCE, known_counts=True)


def _user_rules(user: Mapping[str, str]) -> tuple[Rule, ...]:
    if not user:
        raise ModelError(
            f"{USER_SOURCE} is empty; name at least one module, or leave it out to use the model"
            " family's own plan"
        )
    return tuple(Rule(pattern, _known(style, pattern)) for pattern, style in user.items())


def _known(style: str, pattern: str) -> Style:
    for known in STYLES:
        if style == known:
            return known
    close = get_close_matches(style, STYLES, n=1)
    hint = f"did you mean {close[0]!r}? The" if close else "the"
    raise ModelError(
        f"{USER_SOURCE}: {pattern!r} has the unknown style {style!r}; {hint} styles are"
        f" {', '.join(STYLES)}"
    )


def _transformers_rules(model: nn.Module) -> RuleSet | None:
    """Transformers' plans of the outermost of its models in `model`, which it gathered from their
    classes, configurations and parts.
    """
    rules: list[Rule] = []
    families: list[str] = []
    for name, module, plan in _planned(model):
        family = str(getattr(module.config, "model_type", type(module).__name__))
        prefix = f"{name}." if name else ""
        found = [
            Rule(prefix + pattern, style) for pattern, style in _read(module, plan, family).items()
        ]
        # A plan of an embedding and a head alone, which Transformers adds to every model, says
        # nothing about the layers.
        if any("*" in rule.pattern for rule in found):
            rules += found
            families.append(family)
    if not rules:
        return None
    return RuleSet(tuple(rules), f"transformers' plan of {', '.join(families)}", optional=True)


def _planned(model: nn.Module) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    outer: list[str] = []
    for name, module in model.named_modules():
        # Its own: a wrapper (peft's) passes on what it is asked for, and the names of a plan begin
        # at the model that has it.
        plan = (
            getattr(module, "_tp_plan", None)
            if "_tp_plan" in vars(module) or hasattr(type(module), "_tp_plan")
            else None
        )
        if (
            hasattr(module, "config")
            and isinstance(plan, Mapping)
            and not any(not o or name.startswith(f"{o}.") for o in outer)
        ):
            outer.append(name)
            yield name, module, plan


def _read(model: nn.Module, plan: Mapping[str, str], family: str) -> dict[str, Style]:
    """Transformers' styles as Plait's. Raises ModelError for others, where they name something in
    `model`.
    """
    # Split by parallel.ep or held by every rank, whatever the family's plan makes of them.
    apart = [experts.name for experts in find_experts(model)] if family in SPLIT_FAMILIES else []
    names = [name for name, _ in model.named_modules()] + [
        name for name, _ in model.named_parameters()
    ]
    names = [
        name
        for name in names
        if not any(name == other or name.startswith(f"{other}.") for other in apart)
    ]
    read: dict[str, Style] = {}
    strange: dict[str, str] = {}
    for pattern, style in plan.items():
        renamed = _OLD_NAMES.get(style, style)
        known = next((known for known in STYLES if known == renamed), None)
        if known is not None:
            read[pattern] = known
        elif style != _NO_STYLE and any(matches(name, pattern) for name in names):
            strange[pattern] = style
    if strange:
        shown = ", ".join(f"{pattern} is {style!r}" for pattern, style in list(strange.items())[:3])
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise ModelError(
            f"Transformers' plan of {family} has styles that Plait does not apply: {shown}{more};"
            f" use parallel.tp = 1, or give {USER_SOURCE} with styles for other layers, which"
            " leaves these replicated on every rank"
        )
    return read
