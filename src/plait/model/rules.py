"""Styles of tensor parallelism, and rules that give them to modules by name. Data only: nothing
here changes a model.

Where rules come from is in `sources`, what they mean for one model and one degree in `plans`. A
rule names modules, never parameters; every rule must name one, and no module may get two styles.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    colwise                           splits a layer's outputs; they stay split rowwise
    splits a layer's inputs, which arrive split; partial outputs are summed, the bias added once
    colwise_gather_output             colwise, then every rank gets all outputs: right for any
    layer, fused ones too rowwise_split_input               rowwise on an input that every rank has
    whole: right for any layer embedding_rowwise                 splits an embedding along the
    vocabulary vocab_head                        splits a language model head along the vocabulary;
    a loss may work on split logits replicated_with_grad_allreduce    whole, but applied to this
    rank's heads or channels only: gradients are summed over tp kv_replicated                     a
    key or value projection with fewer heads than ranks: whole, each rank computes the head it needs
"""
STYLES: tuple[Style, ...] = get_args(Style)
COLUMN_STYLES: tuple[Style, ...] = ("colwise", "colwise_gather_output", "vocab_head")
ROW_STYLES: tuple[Style, ...] = ("rowwise", "rowwise_split_input")


@dataclass(frozen=True)
class Rule:
    """`style` for every module that `pattern` names: dotted, from the root; `*` stands for any text
    inside one segment.
    """

    pattern: str
    style: Style


@dataclass(frozen=True)
class Counts:
    """Integers on modules that count heads, so that a rank which computes some of the heads needs
    its own values.
    """

    pattern: str
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class RuleSet:
    """Rules and where they come from."""

    rules: tuple[Rule, ...]
    source: str
    counts: tuple[Counts, ...] = ()
    known_counts: bool = False
    """Also adjust head counts under the usual names (`heads.HEADS`), as plain modules that reshape
    by them need.
    """
    complete: bool = False
    """A user's: taken as it is. To others an embedding and a head are added, and layers that hold
    unknown parameters are gathered.
    """
    optional: bool = False
    """A family's: a rule may name a module that this configuration leaves out, as long as something
    is named.
    """
    whole_sequence: str | None = None
    """Why the family's blocks need full sequences, where the structure does not show it."""


def matches(name: str, pattern: str) -> bool:
    """Whether the dotted `name` fits `pattern`, segment by segment."""
    names = name.split(".")
    patterns = pattern.split(".")
    return len(names) == len(patterns) and all(
        fnmatchcase(n, p) for n, p in zip(names, patterns, strict=True)
    )


def generic(name: str) -> str:
    """`model.layers.3.mlp` as `model.layers.*.mlp`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def assign(model: nn.Module, rule_set: RuleSet) -> dict[str, Style]:
    """Module name to style, in model order. Raises ModelError for a rule that names nothing and for
    two styles of one module.
    """
    by_depth: dict[int, list[Rule]] = {}
    for rule in rule_set.rules:
        by_depth.setdefault(rule.pattern.count("."), []).append(rule)
    chosen: dict[str, Rule] = {}
    used: set[Rule] = set()
    names = [name for name, _ in model.named_modules() if name]
    for name in names:
        for rule in by_depth.get(name.count("."), ()):
            if not matches(name, rule.pattern):
                continue
            used.add(rule)
            first = chosen.setdefault(name, rule)
            if first.style != rule.style:
                raise ModelError(
                    f"{rule_set.source}: {first.pattern!r} gives {name} the style {first.style!r}"
                    f" and {rule.pattern!r} gives it {rule.style!r}; keep one of them"
                )
    for rule in rule_set.rules:
        if rule not in used and not (rule_set.optional and used):
            raise ModelError(
                f"{rule_set.source}: {rule.pattern!r} names no module;"
                f" {_near(rule.pattern, names, model)}"
            )
    return {name: rule.style for name, rule in chosen.items()}


def _near(pattern: str, names: Sequence[str], model: nn.Module) -> str:
    if any(matches(name, pattern) for name, _ in model.named_parameters()):
        return f"it names a parameter; name the module that owns it, {pattern.rpartition('.')[0]!r}"
    # One name for a layer of all blocks, or the closest six would be one layer of six blocks.
    candidates = list(dict.fromkeys(map(generic, names)))
    wanted = generic(pattern)
    close = get_close_matches(wanted, candidates, n=6, cutoff=0.5)
    close = close or [name for name in candidates if name.count(".") == wanted.count(".")][:6]
    return (
        f"near it are {', '.join(close)}"
        if close
        else f"this model's modules are {', '.join(candidates[:6]) or 'none'}"
    )
