"""Kinds of layers, the styles of tensor parallelism for them, and rules that assign styles by name.

Plait computes a split layer itself, on this rank's part of the weight. A layer must therefore be
known to compute exactly what `nn.Linear`, Transformers' `Conv1D` or `nn.Embedding` computes. A
subclass with its own forward, or a wrapped module, is not accepted.

The rules are data: `sources` finds them, and `plans` applies them to one model and one degree. A
rule names modules, never parameters. Every rule must match a module, and a module
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.utils import parametrize

from plait._torch.modules import direct_parameters
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
    """Names of module attributes that contain head counts.

    On a rank that computes only some of the heads, these attributes are set to local counts.
    """

    pattern: str
    """Pattern of the modules, as in `StyleRule`."""
    attributes: tuple[str, ...]


@dataclass(frozen=True)
class RuleSet:
    """Rules for one model, and the source of these rules."""

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
    full_sequence_reason: str | None = None
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
    """Return the style of each module by name, in model order.

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


_SAME_AS_LINEAR = frozenset({"FalconLinear"})
"""Subclasses of nn.Linear whose own forward also computes x W^T + b."""
_NORMS_OVER_TOKENS = ("batch", "group", "instance")
"""Parts of the class names of norms that do not normalise every token by itself."""


def count_parameters(module: nn.Module) -> int:
    """Return the number of elements of all parameters of a module, shared ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def is_conv1d(module: nn.Module) -> bool:
    """Return True for Transformers' `Conv1D`, a linear layer with the weight [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def is_linear(module: nn.Module) -> bool:
    """Return True if a module computes exactly x W^T + b (`nn.Linear`) or x W + b (`Conv1D`)."""
    # A forward in the instance's dictionary replaces that of the class.
    if "forward" in vars(module) or parametrize.is_parametrized(module):
        return False
    if is_conv1d(module):
        return True
    if not isinstance(module, nn.Linear):
        return False
    if (
        type(module).forward is not nn.Linear.forward
        and type(module).__name__ not in _SAME_AS_LINEAR
    ):
        return False
    return set(direct_parameters(module)) == {"weight", "bias"} and module.weight.ndim == 2


def is_embedding(module: nn.Module) -> bool:
    """Return True if a module is exactly a lookup of rows, with an optional constant factor.

    A rank can compute such a module with only a part of the rows.
    """
    # max_norm changes the weight in the forward; scale_grad_by_freq and sparse change its gradient.
    return (
        isinstance(module, nn.Embedding)
        and "forward" not in vars(module)
        and not parametrize.is_parametrized(module)
        and (type(module).forward is nn.Embedding.forward or embedding_scale(module) is not None)
        and module.max_norm is None
        and not module.scale_grad_by_freq
        and not module.sparse
    )


def embedding_scale(module: nn.Module) -> float | torch.Tensor | None:
    """Return the factor of Transformers' scaled embeddings (Gemma, BART), or None otherwise."""
    module_class = type(module)
    if not module_class.__name__.endswith("ScaledWordEmbedding"):
        return None
    if not module_class.__module__.startswith("transformers."):
        return None
    scale = getattr(module, "embed_scale", None)
    return scale if isinstance(scale, int | float | torch.Tensor) else None


def is_norm(module: nn.Module) -> bool:
    """Return True if a module normalises each token separately, judged by its class name."""
    class_name = type(module).__name__.lower()
    return "norm" in class_name and not any(part in class_name for part in _NORMS_OVER_TOKENS)


def in_features(module: nn.Module) -> int:
    """Return the number of inputs of a linear layer."""
    return _features(module)[0]


def out_features(module: nn.Module) -> int:
    """Return the number of outputs of a linear layer."""
    return _features(module)[1]


def _features(module: nn.Module) -> tuple[int, int]:
    first, second = module.get_parameter("weight").shape
    if is_conv1d(module):
        return first, second
    return second, first


def split_dims(module: nn.Module, style: Style) -> Mapping[str, int | None]:
    """Return the dimension along which a style splits each of a module's own parameters.

    None means that the parameter is replicated.
    """
    output_dim = 1 if is_conv1d(module) else 0
    if style in COLUMN_STYLES:
        return {"weight": output_dim, "bias": 0}
    if style in ROW_STYLES:
        # The bias is added once, after the sum over the ranks.
        return {"weight": 1 - output_dim, "bias": None}
    if style == "embedding_rowwise":
        return {"weight": 0}
    return {name: None for name, _ in module.named_parameters(recurse=False)}


def check_style(model: nn.Module, name: str, style: Style, source: str) -> None:
    """Check that a style can be applied to a module.

    Args:
        model: The model.
        name: Full name of the module.
        style: The style.
        source: Where the style comes from, for the message.

    Raises:
        ModelError: The style cannot be applied.
    """
    module = model.get_submodule(name)
    class_name = type(module).__name__
    if style == "replicated_with_grad_allreduce":
        if next(module.parameters(), None) is None:
            raise ModelError(
                f"{source}: {name} ({class_name}) has no parameters, so {style!r} does nothing to"
                " it; leave it out"
            )
        return
    if style == "embedding_rowwise":
        if not is_embedding(module):
            raise ModelError(
                f"{source}: {name} ({class_name}) cannot be {style!r}: it must be an nn.Embedding"
                " with that class's forward and no max_norm, scale_grad_by_freq or sparse; leave"
                " it out, which keeps it replicated on every rank"
            )
        return

    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        raise ModelError(
            f"{source}: {name} belongs to an nn.MultiheadAttention, which reads the layer's weight"
            " instead of calling the layer; leave it out"
        )
    if not is_linear(module):
        reason = ""
        if _computes_its_weight(module):
            reason = (
                ", and its weight is computed from other parameters (a parametrization,"
                " weight_norm, spectral_norm or pruning)"
            )
        raise ModelError(
            f"{source}: {name} ({class_name}) cannot be {style!r}: it must be an nn.Linear or"
            f" Transformers' Conv1D with that class's forward{reason}; leave it out, which keeps it"
            " replicated on every rank"
        )


def _computes_its_weight(module: nn.Module) -> bool:
    if parametrize.is_parametrized(module):
        return True
    # The older torch.nn.utils.weight_norm and pruning assign a plain tensor before each forward.
    return "weight" not in direct_parameters(module) and isinstance(
        getattr(module, "weight", None), torch.Tensor
    )


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return one group of names per tied parameter, in the order of registration."""
    # Tensors compare elementwise, so parameters are compared by identity.
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of every tied parameter, keyed by each of its names."""
    return {name: group[0] for group in tied_names(model) for name in group}
