"""Which style of tensor parallelism each module of a model should get: rules as data, from the first source that has some.

The sources, in order: the user's `{pattern: style}`; Plait's table where Transformers has no plan, or one that does not hold
(`plan_table`); Transformers' own plan, read as data; a guess from the structure (`guess`). A rule names modules, never parameters. What
the rules mean for one model and one degree is decided in `plans`; nothing here changes a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn

from plait.errors import ModelError

Style = Literal[
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "vocab_head",
    "replicated_with_grad_allreduce",
    "kv_replicated",
]
"""
    colwise                           splits a layer's outputs; they stay split
    rowwise                           splits a layer's inputs, which arrive split; the partial outputs are summed, the bias added once
    colwise_gather_output             colwise, then every rank gets all outputs: right for any layer, fused ones too
    rowwise_split_input               rowwise on an input that every rank has whole: right for any layer
    embedding_rowwise                 splits an embedding along the vocabulary
    vocab_head                        splits a language model head along the vocabulary; the loss works on split logits
    replicated_with_grad_allreduce    whole on every rank but applied to this rank's heads only: gradients are summed over tp
    kv_replicated                     a key or value projection with fewer heads than ranks: whole, each rank computes the head it needs
"""
STYLES: tuple[Style, ...] = get_args(Style)
COLUMN_STYLES: tuple[Style, ...] = ("colwise", "colwise_gather_output", "vocab_head")
ROW_STYLES: tuple[Style, ...] = ("rowwise", "rowwise_split_input")

USER_SOURCE = "parallel.plan"
GUESS_SOURCE = "guessed"

_OLD_NAMES: dict[str, Style] = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
_NO_STYLE = "replicate"


@dataclass(frozen=True)
class Rule:
    """`style` for every module that `pattern` names: dotted, from the root; `*` stands for any text inside one segment."""

    pattern: str
    style: Style


@dataclass(frozen=True)
class Counts:
    """Integers on modules that count heads, so that a rank which computes some of the heads needs its own values."""

    pattern: str
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class RuleSet:
    """Rules and where they come from."""

    rules: tuple[Rule, ...]
    source: str
    counts: tuple[Counts, ...] = ()
    known_counts: bool = False
    """Also adjust head counts under the usual names (`heads.HEADS`), as plain modules that reshape by them need."""
    complete: bool = False
    """Embedding and head are named, or left out on purpose; nothing is added."""
    whole_sequence: str | None = None
    """Why the family's blocks need whole sequences, where the structure does not show it."""


def matches(name: str, pattern: str) -> bool:
    """Whether the dotted `name` fits `pattern`, segment by segment."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(fnmatchcase(n, p) for n, p in zip(names, patterns, strict=True))


def rules_for(model: nn.Module, *, user: Mapping[str, str] | None = None, blocks: Sequence[str] = ()) -> RuleSet:
    """The rules for `model`.

    `user` is used alone when given. `blocks` (see `find_blocks`) is where a guess looks. Raises ModelError for an unknown style, a style of
    Transformers that Plait does not apply, or a model that nothing is known or guessed about.
    """
    from plait.model.guess import guess_rules
    from plait.model.plan_table import table_rules

    if user is not None:
        return RuleSet(_user_rules(user), USER_SOURCE, known_counts=True, complete=True)
    found = table_rules(model) or _transformers_rules(model)
    if found is not None:
        return found
    return RuleSet(guess_rules(model, blocks), GUESS_SOURCE, known_counts=True)


def assign(model: nn.Module, rule_set: RuleSet) -> dict[str, Style]:
    """Module name to style, in model order.

    Every rule must match a module, except that Transformers' plans and the table may name modules that a configuration leaves out as long as
    something matches. Two rules of different styles for one module are refused.
    """
    chosen: dict[str, Rule] = {}
    unmatched = {rule.pattern for rule in rule_set.rules}
    by_length: dict[int, list[Rule]] = {}
    for rule in rule_set.rules:
        by_length.setdefault(rule.pattern.count("."), []).append(rule)
    names = [name for name, _ in model.named_modules() if name]
    for name in names:
        for rule in by_length.get(name.count("."), ()):
            if not matches(name, rule.pattern):
                continue
            unmatched.discard(rule.pattern)
            first = chosen.setdefault(name, rule)
            if first.style != rule.style:
                raise ModelError(
                    f"{rule_set.source}: {first.pattern!r} gives {name} the style {first.style!r} and {rule.pattern!r} gives it "
                    f"{rule.style!r}; keep one of them"
                )
    optional = rule_set.source not in (USER_SOURCE, GUESS_SOURCE)
    for rule in rule_set.rules:
        if rule.pattern in unmatched and not (optional and chosen):
            raise ModelError(f"{rule_set.source}: {rule.pattern!r} names no module; {_near(rule.pattern, names, model)}")
    return {name: chosen[name].style for name in names if name in chosen}


def _near(pattern: str, names: Sequence[str], model: nn.Module) -> str:
    if any(matches(name, pattern) for name, _ in model.named_parameters()):
        return f"it names a parameter; name the module that owns it, {pattern.rpartition('.')[0]!r}"
    # Compare with one block's names, or the closest six would be one module in six blocks.
    generic = list(dict.fromkeys(".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names))
    wanted = ".".join("*" if part.isdigit() else part for part in pattern.split("."))
    close = get_close_matches(wanted, generic, n=6, cutoff=0.5) or [name for name in generic if name.count(".") == wanted.count(".")][:6]
    return f"near it are {', '.join(close)}" if close else f"this model's modules are {', '.join(generic[:6]) or 'none'}"


def _user_rules(user: Mapping[str, str]) -> tuple[Rule, ...]:
    if not user:
        raise ModelError(f"{USER_SOURCE} is empty; name at least one module, or leave it out to use the model family's own plan")
    return tuple(Rule(pattern, _known(style, f"{USER_SOURCE}: {pattern!r}")) for pattern, style in user.items())


def _known(style: str, place: str) -> Style:
    if style in STYLES:
        return style
    close = get_close_matches(style, STYLES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ModelError(f"{place} has the unknown style {style!r}; {hint}the styles are {', '.join(STYLES)}")


def _transformers_rules(model: nn.Module) -> RuleSet | None:
    """Transformers' plan, gathered by it from the classes and configurations of the model and its parts."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan or not hasattr(model, "config"):
        return None
    family = str(getattr(model.config, "model_type", type(model).__name__))
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    rules, strange = [], {}
    for pattern, style in plan.items():
        style = _OLD_NAMES.get(style, style)
        if style in STYLES:
            rules.append(Rule(pattern, style))
        elif style != _NO_STYLE and any(matches(name, pattern) for name in names):
            strange[pattern] = style
    if strange:
        _refuse_styles(family, strange)
    return RuleSet(tuple(rules), f"transformers' plan of {family}") if _splits_blocks(rules) else None


def _refuse_styles(family: str, strange: Mapping[str, str]) -> None:
    shown = ", ".join(f"{pattern} = {style!r}" for pattern, style in list(strange.items())[:3])
    more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
    kind = "experts" if any("moe" in style or "packed" in style for style in strange.values()) else "layers"
    raise ModelError(
        f"Transformers' plan of {family} has styles that Plait does not apply ({shown}{more}); use parallel.tp = 1, or give {USER_SOURCE} with "
        f"styles for the other layers, which leaves these {kind} whole on every rank"
    )


def _splits_blocks(rules: Iterable[Rule]) -> bool:
    """A plan of only an embedding and a head (Transformers adds these to every model) says nothing about the layers."""
    return any("*" in rule.pattern for rule in rules)
