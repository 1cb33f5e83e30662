"""Tensor-parallel rules for a transformer without written rules, derived from its structure.

Each module that owns linear layers gets the best split that is known to be correct: column- and
row-parallel where a test run shows it (`split_check`), or, where the module cannot be run, for an
MLP with the usual names and matching shapes; otherwise every layer with its output gathered, which
is correct for any layer that is called as a module. Layers of which not even that is known stay
replicated. Check the complete plan with `plait verify`; it does not run automatically.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from plait.errors import ModelError
from plait.model.layers import in_features, is_embedding, is_linear, out_features
from plait.model.rules import Rule, Style, generic, matches
from plait.model.split_check import can_be_run, checked_split

UP_NAMES = frozenset(
    {
        "up",
        "up_proj",
        "gate",
        "gate_proj",
        "fc1",
        "fc_in",
        "w1",
        "w3",
        "c_fc",
        "dense_h_to_4h",
        "lin1",
        "linear1",
        "fc",
        "wi",
    }
    | {"wi_0", "wi_1", "w_in", "proj_in", "linear_in", "ff1", "w_gate", "w_up"}
)
DOWN_NAMES = frozenset(
    {
        "down",
        "down_proj",
        "fc2",
        "fc_out",
        "w2",
        "c_proj",
        "dense_4h_to_h",
        "lin2",
        "linear2",
        "wo",
        "w_out",
        "proj_out",
    }
    | {"linear_out", "ff2", "w_down", "proj", "out"}
)
OUT_NAMES = (
    frozenset({"o_proj", "out_proj", "dense", "o", "to_out", "o_lin", "out_lin"}) | DOWN_NAMES
)
"""Layers that come last in an attention or MLP."""
_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""torch's own modules that hand their children's weights to fused kernels without calling the
children.
"""
_POSITIONS = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index"})
"""Attributes that tell a block where it is: blocks that differ in these alone have the same split.
"""

Layers = Mapping[str, nn.Module]
Split = dict[str, Style]


def guess_rules(model: nn.Module, blocks: Sequence[str]) -> tuple[Rule, ...]:
    """Rules for `model`, looking inside `blocks` (everywhere, without blocks), and at an embedding
    and a head of one vocabulary.

    Raises ModelError when no layer can be split.
    """
    found: Split = {}
    tried: dict[object, Split | None] = {}
    readers: dict[tuple[type, str], bool] = {}
    ends = _vocabulary(model, blocks)
    for block in blocks or ("",):
        for name, module in _owners(model.get_submodule(block), block):
            prefix = f"{name}." if name else ""
            linear = {
                leaf: child
                for leaf, child in module.named_children()
                if is_linear(child) and prefix + leaf not in ends
            }
            for leaf in linear:
                if (type(module), leaf) not in readers:
                    readers[type(module), leaf] = _reads_weight(type(module), leaf)
            layers = {
                leaf: child for leaf, child in linear.items() if not readers[type(module), leaf]
            }
            found |= {
                prefix + leaf: style for leaf, style in _split_of(module, layers, tried).items()
            }
    if not found:
        where = f"{blocks[0]} to {blocks[-1]}" if blocks else "the model"
        raise ModelError(
            f"no plan is known for {type(model).__name__}, and in {where} there is no nn.Linear"
            " that is known to be called as a module; give parallel.plan as {pattern: style}, or"
            " use parallel.tp = 1"
        )
    return _as_patterns(model, found | ends)


def _owners(root: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules that own linear layers, without those that use their children's weights
    themselves.
    """
    hidden: list[str] = []
    for name, module in root.named_modules(prefix=prefix):
        if any(name.startswith(f"{outer}.") for outer in hidden):
            continue
        if isinstance(module, _READS_WEIGHTS):
            hidden.append(name)
        elif any(is_linear(child) for child in module.children()):
            yield name, module


def _reads_weight(kind: type, leaf: str) -> bool:
    """Whether the code of a class computes with a child's weight itself, without calling the child,
    or cannot be read.
    """
    pattern = re.compile(rf"\bself\.{re.escape(leaf)}\.(weight|bias)\b")
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            break
        for name, value in vars(base).items():
            if not inspect.isfunction(value) or "init" in name or "reset" in name:
                continue
            try:
                source = inspect.getsource(value)
            except (OSError, TypeError):
                return True
            if pattern.search(source):
                return True
    return False


def _split_of(module: nn.Module, layers: Layers, tried: dict[object, Split | None]) -> Split:
    """The best split of one module's layers that can be justified."""
    key = signature(module)
    if key not in tried:
        tried[key] = checked_split(module, layers)
    proven = tried[key]
    if proven is not None:
        return proven
    return (_mlp_by_name(layers) if not can_be_run(module) else None) or _gathered(layers)


def signature(module: nn.Module) -> object:
    """Equal for modules with the same behaviour: classes, sizes, and every plain number that steers
    them.
    """
    parameters = tuple(
        (name, tuple(parameter.shape)) for name, parameter in module.named_parameters()
    )
    parts = tuple((name, type(part)) for name, part in module.named_modules())
    numbers = tuple(
        (name, attribute, value)
        for name, part in module.named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, int | float | str) and attribute not in _POSITIONS
    )
    return parameters, parts, numbers


def _mlp_by_name(layers: Layers) -> Split | None:
    """The usual names of an MLP, with shapes that fit: every up reads the width, the one down reads
    what each up makes.
    """
    ups = [leaf for leaf in layers if leaf in UP_NAMES]
    downs = [leaf for leaf in layers if leaf in DOWN_NAMES]
    if not ups or len(downs) != 1:
        return None
    down = layers[downs[0]]
    if any(
        (in_features(layers[up]), out_features(layers[up]))
        != (out_features(down), in_features(down))
        for up in ups
    ):
        return None
    others = {leaf: layer for leaf, layer in layers.items() if leaf not in (*ups, *downs)}
    return {**dict.fromkeys(ups, "colwise"), downs[0]: "rowwise", **_gathered(others)}


def _gathered(layers: Layers) -> Split:
    """Right for any layer. The one that by its name comes last takes slices of its input: its
    output is summed instead of gathered.
    """
    split: Split = dict.fromkeys(layers, "colwise_gather_output")
    last = [leaf for leaf in layers if leaf in OUT_NAMES]
    if len(layers) > 1 and len(last) == 1:
        split[last[0]] = "rowwise_split_input"
    return split


def _vocabulary(model: nn.Module, blocks: Sequence[str]) -> Split:
    """The one head and the one embedding of the same vocabulary, outside the blocks. Called as
    modules, so both can be split along it.
    """
    outside = {
        name: m
        for name, m in model.named_modules()
        if not any(name.startswith(f"{block}.") for block in blocks)
    }
    embeddings = {
        name: tuple(m.get_parameter("weight").shape)
        for name, m in outside.items()
        if is_embedding(m)
    }
    heads = {name: (out_features(m), in_features(m)) for name, m in outside.items() if is_linear(m)}
    pairs = [
        (embedding, head)
        for embedding, shape in embeddings.items()
        for head, other in heads.items()
        if shape == other
    ]
    return {pairs[0][0]: "embedding_rowwise", pairs[0][1]: "vocab_head"} if len(pairs) == 1 else {}


def _as_patterns(model: nn.Module, found: Split) -> tuple[Rule, ...]:
    """One rule for the same layer of every block, where the blocks agree; names where they do
    not.
    """
    patterns: dict[str, list[str]] = {}
    for name in found:
        patterns.setdefault(generic(name), []).append(name)
    alike: dict[str, set[str]] = {}
    for name, _ in model.named_modules():
        alike.setdefault(generic(name), set()).add(name)
    rules: list[Rule] = []
    for pattern, members in patterns.items():
        named = {name for name in alike[pattern] if matches(name, pattern)}
        agree = len({found[name] for name in members}) == 1 and set(members) == named
        rules += (
            [Rule(pattern, found[members[0]])]
            if agree
            else [Rule(name, found[name]) for name in members]
        )
    return tuple(rules)
