"""Tensor-parallel rules for a transformer without written rules, derived from its structure.

Note [Choice of a guessed split]
    Each module that owns linear layers gets the best split that is known to be correct:

    1. Column- and row-parallel layers, if a numerical test of the module shows that this is correct
       (`split_check`).
    2. The same for an MLP with the usual names and matching shapes, if the module cannot be run.
    3. Otherwise every layer with its output gathered, which is correct for any layer that is called
       as a module.

    Layers that may not be called as modules stay replicated.

The complete plan can be checked with `plait verify`, which does not run automatically.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from plait.errors import ModelError
from plait.model.layers import in_features, is_embedding, is_linear, out_features
from plait.model.rules import Style, StyleRule, generic, matches
from plait.model.sequence import is_inside
from plait.model.split_check import can_be_run, checked_split

UP_NAMES = frozenset(
    {"up", "up_proj", "gate", "gate_proj", "fc1", "fc_in", "w1", "w3", "c_fc", "dense_h_to_4h"}
    | {"lin1", "linear1", "fc", "wi", "wi_0", "wi_1", "w_in", "proj_in", "linear_in", "ff1"}
    | {"w_gate", "w_up"}
)
"""Usual names of the first layers of an MLP."""
DOWN_NAMES = frozenset(
    {"down", "down_proj", "fc2", "fc_out", "w2", "c_proj", "dense_4h_to_h", "lin2", "linear2"}
    | {"wo", "w_out", "proj_out", "linear_out", "ff2", "w_down", "proj", "out"}
)
"""Usual names of the last layer of an MLP."""
OUT_NAMES = (
    frozenset({"o_proj", "out_proj", "dense", "o", "to_out", "o_lin", "out_lin"}) | DOWN_NAMES
)
"""Usual names of the last layer of an attention or MLP."""
_MODULES_WITH_FUSED_KERNELS = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
"""Modules of torch that pass the weights of their children to a kernel and do not call them."""
_LAYER_INDICES = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index"})
"""Attributes with the index of a block. Blocks that differ only in them have the same split."""

Layers = Mapping[str, nn.Module]
Split = dict[str, Style]


def guess_rules(model: nn.Module, blocks: Sequence[str]) -> tuple[StyleRule, ...]:
    """Derive tensor-parallel rules from the structure of a model.

    See Note [Choice of a guessed split].

    Args:
        model: The model without adapters, on any device.
        blocks: Names of its repeated blocks, whose layers are split. Without blocks, all layers of
            the model are considered. An embedding and a head of the same vocabulary are split in
            any case.

    Raises:
        ModelError: No layer can be split.
    """
    styles: Split = {}
    proven_splits: dict[object, Split | None] = {}
    reads_weight: dict[tuple[type, str], bool] = {}
    boundary = _vocabulary_split(model, blocks)

    for block in blocks or ("",):
        for name, module in _owners_of_linear_layers(model.get_submodule(block), block):
            prefix = f"{name}." if name else ""
            layers = {}
            for leaf, child in module.named_children():
                if not is_linear(child) or prefix + leaf in boundary:
                    continue
                # Blocks are alike, so the code of each class is inspected once.
                key = (type(module), leaf)
                if key not in reads_weight:
                    reads_weight[key] = _reads_weight(type(module), leaf)
                if not reads_weight[key]:
                    layers[leaf] = child
            split = _best_split(module, layers, proven_splits)
            styles |= {prefix + leaf: style for leaf, style in split.items()}

    if not styles:
        where = f"{blocks[0]} to {blocks[-1]}" if blocks else "the model"
        raise ModelError(
            f"no plan is known for {type(model).__name__}, and in {where} there is no nn.Linear"
            " that is known to be called as a module; give parallel.plan as {pattern: style}, or"
            " use parallel.tp = 1"
        )
    return _as_patterns(model, styles | boundary)


def _owners_of_linear_layers(root: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with linear children, except those that use the children's weights."""
    fused: list[str] = []
    for name, module in root.named_modules(prefix=prefix):
        if is_inside(name, fused):
            continue
        if isinstance(module, _MODULES_WITH_FUSED_KERNELS):
            fused.append(name)
        elif any(is_linear(child) for child in module.children()):
            yield name, module


def _reads_weight(module_class: type, leaf: str) -> bool:
    """Return True if the code of a class computes with the weight of a child itself.

    It is also True if the source of a method is not available.
    """
    pattern = re.compile(rf"\bself\.{re.escape(leaf)}\.(weight|bias)\b")
    for base in module_class.__mro__:
        # Modules of torch that compute with the weights of children are known by class.
        if base.__module__.startswith("torch."):
            break
        for name, value in vars(base).items():
            # Methods that initialise weights do not matter for the forward.
            if not inspect.isfunction(value) or "init" in name or "reset" in name:
                continue
            try:
                source = inspect.getsource(value)
            except (OSError, TypeError):
                return True
            if pattern.search(source):
                return True
    return False


def _best_split(
    module: nn.Module, layers: Layers, proven_splits: dict[object, Split | None]
) -> Split:
    """Return the split of one module by Note [Choice of a guessed split].

    Args:
        module: The module that owns the layers.
        layers: Its linear children that may be split, by name.
        proven_splits: Cache of numerical tests, because blocks are alike.
    """
    key = signature(module)
    if key not in proven_splits:
        proven_splits[key] = checked_split(module, layers)
    proven = proven_splits[key]
    if proven is not None:
        return proven

    # If the module could be run, the test has just shown that its names are misleading.
    if not can_be_run(module):
        by_name = _mlp_split_by_name(layers)
        if by_name:
            return by_name
    return _gathered_split(layers)


def signature(module: nn.Module) -> object:
    """Return a key that is equal for modules with the same behaviour.

    It consists of classes, of shapes of parameters, and of all plain numbers and strings that are
    attributes of the modules, except for layer indices.
    """
    parameters = tuple(
        (name, tuple(parameter.shape)) for name, parameter in module.named_parameters()
    )
    classes = []
    attributes = []
    for name, submodule in module.named_modules():
        classes.append((name, type(submodule)))
        for attribute, value in vars(submodule).items():
            if isinstance(value, int | float | str) and attribute not in _LAYER_INDICES:
                attributes.append((name, attribute, value))
    return parameters, tuple(classes), tuple(attributes)


def _mlp_split_by_name(layers: Layers) -> Split | None:
    """Return the split of layers with the usual names and matching shapes of an MLP, or None."""
    ups = [leaf for leaf in layers if leaf in UP_NAMES]
    downs = [leaf for leaf in layers if leaf in DOWN_NAMES]
    if not ups or len(downs) != 1:
        return None

    down = layers[downs[0]]
    for leaf in ups:
        up = layers[leaf]
        if in_features(up) != out_features(down) or out_features(up) != in_features(down):
            return None

    others = {leaf: layer for leaf, layer in layers.items() if leaf not in (*ups, *downs)}
    return {**dict.fromkeys(ups, "colwise"), downs[0]: "rowwise", **_gathered_split(others)}


def _gathered_split(layers: Layers) -> Split:
    """Return a split that is correct for any layers.

    The output of the last layer, which is recognised by its name, is summed instead of gathered.
    """
    split: Split = dict.fromkeys(layers, "colwise_gather_output")
    last = [leaf for leaf in layers if leaf in OUT_NAMES]
    if len(layers) > 1 and len(last) == 1:
        split[last[0]] = "rowwise_split_input"
    return split


def _vocabulary_split(model: nn.Module, blocks: Sequence[str]) -> Split:
    """Return the split of the head and embedding outside of the blocks.

    It is empty unless there is exactly one pair with the same vocabulary and width.
    """
    embeddings = {}
    heads = {}
    for name, module in model.named_modules():
        if is_inside(name, blocks):
            continue
        if is_embedding(module):
            embeddings[name] = tuple(module.get_parameter("weight").shape)
        if is_linear(module):
            heads[name] = (out_features(module), in_features(module))

    # Shapes are [vocabulary, width]. With several pairs it is unknown which layers belong together.
    pairs = [
        (embedding, head)
        for embedding in embeddings
        for head in heads
        if embeddings[embedding] == heads[head]
    ]
    if len(pairs) != 1:
        return {}
    embedding, head = pairs[0]
    return {embedding: "embedding_rowwise", head: "vocab_head"}


def _as_patterns(model: nn.Module, styles: Split) -> tuple[StyleRule, ...]:
    """Return one rule for the same layer of all blocks, or one per block if they differ."""
    members: dict[str, list[str]] = {}
    for name in styles:
        members.setdefault(generic(name), []).append(name)
    modules: dict[str, set[str]] = {}
    for name, _ in model.named_modules():
        modules.setdefault(generic(name), set()).add(name)

    rules: list[StyleRule] = []
    for pattern, names in members.items():
        matching = {name for name in modules[pattern] if matches(name, pattern)}
        distinct_styles = {styles[name] for name in names}
        if len(distinct_styles) == 1 and set(names) == matching:
            rules.append(StyleRule(pattern, styles[names[0]]))
        else:
            rules += [StyleRule(name, styles[name]) for name in names]
    return tuple(rules)
