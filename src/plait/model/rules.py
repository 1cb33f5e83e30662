"""Styles of tensor parallelism, and rules that assign them to modules by name.

The rules are data. `sources` says where they come from, and `plans` what they mean for one model
and one degree. A rule names modules, never parameters. Every rule must match a module, and a module
must not get two styles.

Note [Styles]
    colwise
        Splits the outputs of a layer. They stay split.
    rowwise
        Splits the inputs of a layer, which arrive split. Partial outputs are summed over the ranks,
        and the bias is added once.
    colwise_gather_output
        As colwise, then every rank gets all outputs. Correct for any layer, fused ones included.
    rowwise_split_input
        As rowwise, for an input that every rank has in full. Correct for any layer.
    embedding_rowwise
        Splits an embedding along the vocabulary.
    vocab_head
        Splits a language-model head along the vocabulary. A loss may compute on split logits.
    replicated_with_grad_allreduce
        Replicates a module that is applied only to this rank's heads or channels. Its gradients are
        summed over tp.
    kv_replicated
        Replicates a key or value projection with fewer heads than ranks. Each rank computes the
        head that its queries need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn

from plait.errors import ModelError
from plait.names import similar_names

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
"""Name of a style. See Note [Styles]."""
STYLES: tuple[Style, ...] = get_args(Style)
COLUMN_STYLES: tuple[Style, ...] = ("colwise", "colwise_gather_output", "vocab_head")
ROW_STYLES: tuple[Style, ...] = ("rowwise", "rowwise_split_input")


@dataclass(frozen=True)
class StyleRule:
    """Style for all modules that match a pattern."""

    pattern: str
    """Dotted name from the root; `*` matches any text inside one segment."""
    style: Style


@dataclass(frozen=True)
class Counts:
    """Integers on modules that count heads.

    A rank that computes some of the heads needs its own values.
    """

    pattern: str
    """Pattern of the modules, as in `StyleRule`."""
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class RuleSet:
    """Rules for one model and their source."""

    rules: tuple[StyleRule, ...]
    source: str
    """Source of the rules, for messages."""
    counts: tuple[Counts, ...] = ()
    known_counts: bool = False
    """True if head counts under the usual names (`heads.HEADS`) are adjusted as well.

    Plain modules that reshape by them need this.
    """
    complete: bool = False
    """True if the rules are applied as they are, because a user wrote them.

    Other rules are extended by an embedding and a head, and layers around parameters of unknown use
    are gathered.
    """
    optional: bool = False
    """True if a rule may match no module, as long as another rule matches one.

    A configuration of a family may not have all of its layers.
    """
    whole_sequence: str | None = None
    """Reason why the blocks need full sequences, if the structure does not show it."""


def matches(name: str, pattern: str) -> bool:
    """Return True if a dotted name matches a pattern, segment by segment."""
    names = name.split(".")
    patterns = pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def generic(name: str) -> str:
    """Return a name with its indices replaced: `model.layers.3.mlp` as `model.layers.*.mlp`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def assign(model: nn.Module, rule_set: RuleSet) -> dict[str, Style]:
    """Return the style by module name, in model order.

    Raises:
        ModelError: A rule matches no module, or two rules give a module different styles.
    """
    # Only patterns with as many segments as the name can match it.
    rules_by_depth: dict[int, list[StyleRule]] = {}
    for rule in rule_set.rules:
        rules_by_depth.setdefault(rule.pattern.count("."), []).append(rule)

    rule_of_module: dict[str, StyleRule] = {}
    used: set[StyleRule] = set()
    names = [name for name, _ in model.named_modules() if name]
    for name in names:
        for rule in rules_by_depth.get(name.count("."), ()):
            if not matches(name, rule.pattern):
                continue
            used.add(rule)
            first = rule_of_module.setdefault(name, rule)
            if first.style != rule.style:
                raise ModelError(
                    f"{rule_set.source}: {first.pattern!r} gives {name} the style {first.style!r}"
                    f" and {rule.pattern!r} gives it {rule.style!r}; keep one of them"
                )

    for rule in rule_set.rules:
        if rule not in used and not (rule_set.optional and used):
            raise ModelError(
                f"{rule_set.source}: {rule.pattern!r} names no module;"
                f" {_suggestion(rule.pattern, names, model)}"
            )
    return {name: rule.style for name, rule in rule_of_module.items()}


def _suggestion(pattern: str, names: Sequence[str], model: nn.Module) -> str:
    """Return the remedy for a pattern that matches no module."""
    if any(matches(name, pattern) for name, _ in model.named_parameters()):
        return f"it names a parameter; name the module that owns it, {pattern.rpartition('.')[0]!r}"

    # Layers are suggested under their generic names. Otherwise the closest six names could be one
    # layer of six blocks.
    candidates = list(dict.fromkeys(map(generic, names)))
    target = generic(pattern)
    close = similar_names(target, candidates, count=6, cutoff=0.5)
    if not close:
        close = [name for name in candidates if name.count(".") == target.count(".")][:6]
    if close:
        return f"near it are {', '.join(close)}"
    return f"this model's modules are {', '.join(candidates[:6]) or 'none'}"
