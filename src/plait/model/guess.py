"""Tensor-parallel rules that are derived from a model's structure, for models without a plan.

Note [Choice of a guessed split]
    Each module that owns linear layers gets the best split that is known to be correct:

    1. Column- and row-parallel layers, if a numerical test of the module shows that this is correct
       (`checked_split`).
    2. The same split for an MLP with the usual names and matching shapes, if the module cannot be
       run.
    3. Otherwise every layer with its output gathered, which is correct for any layer that is called
       as a module.

    A layer that may be used in any other way stays replicated.

The complete plan can be checked with `plait verify`, which does not run automatically.

Note [Check of a split]
    The module runs by itself on the CPU with random weights: once in full, and once per part with
    its slice of the columns and rows. For random inputs, the outputs of the parts must add up to
    the full output. The sum and the full output are both functions of the weights and inputs. If
    they agree for random values, they agree for all weights and inputs, and so do their gradients.
    A split of a module that cannot run by itself is not accepted.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from plait._torch.modules import direct_buffers, direct_parameters
from plait.cluster.layout import shard_length, shard_lengths
from plait.errors import ModelError
from plait.model.heads import HEADS, KV_HEADS, count_attributes
from plait.model.layers import (
    Style,
    StyleRule,
    count_parameters,
    generic,
    in_features,
    is_embedding,
    is_linear,
    matches,
    out_features,
    split_dims,
)
from plait.model.sequence import is_inside

MAX_PARAMETERS = 2**28
"""Largest number of parameters of a module that is run.

In float32 they take 1 GiB, and the parts take as much again.
"""
_MAX_FLOAT64_PARAMETERS = 2**22
"""Largest number of parameters of a module that is run in float64."""
_MAX_LAYERS = 6
"""Largest number of linear layers for which a split is searched."""


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
            f"no plan is known for {type(model).__name__}, and none can be derived, because no"
            f" nn.Linear that is called as a module (and not only read for its weight) was found in"
            f" {where}; set parallel.plan as {{pattern: style}}, or use parallel.tp = 1"
        )
    return _as_patterns(model, styles | boundary)


def _owners_of_linear_layers(root: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with linear children, except those that read the children's weights."""
    fused: list[str] = []
    for name, module in root.named_modules(prefix=prefix):
        if is_inside(name, fused):
            continue
        if isinstance(module, _MODULES_WITH_FUSED_KERNELS):
            fused.append(name)
        elif any(is_linear(child) for child in module.children()):
            yield name, module


def _reads_weight(module_class: type, leaf: str) -> bool:
    """Return True if the code of a class reads the weight of a child instead of calling the child.

    The result is also True if the source of a method is not available.
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
    """Return the split of one module according to Note [Choice of a guessed split].

    Args:
        module: The module that owns the layers.
        layers: Its linear children that may be split, by name.
        proven_splits: Results of numerical tests by `signature`, because equal modules repeat.
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
    """Return the split of the head and the embedding outside the blocks.

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
    """Return one rule for the same layer of all blocks, or one per block if the styles differ."""
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


def checked_split(module: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, Style] | None:
    """Find a correct split of a module into column-split layers and one row-split layer.

    See Note [Check of a split]. The module's head counts, under their usual names, are divided by
    the number of parts.

    Args:
        module: The module.
        layers: Its linear children, by name.

    Returns:
        Styles of the linear children and of all other children with parameters. None if no such
        split is correct, or none can be tested.
    """
    if not 2 <= len(layers) <= _MAX_LAYERS or not can_be_run(module):
        return None
    counts = [name for name in count_attributes(module) if name in (*HEADS, *KV_HEADS)]
    parts = _number_of_parts(module, counts)
    if parts is None:
        return None

    # The row-split layer is usually the last one.
    for row in reversed(list(layers)):
        columns = [leaf for leaf in layers if leaf != row]
        width = in_features(layers[columns[0]])
        widths = {in_features(layers[leaf]) for leaf in columns} | {out_features(layers[row])}
        if widths != {width}:
            continue
        split: dict[str, Style] = {**dict.fromkeys(columns, "colwise"), row: "rowwise"}
        if _adds_up(module, split, parts, counts, width):
            # Every part uses the other parameters, so their gradients are sums over the parts.
            for leaf, child in module.named_children():
                if leaf not in split and next(child.parameters(), None) is not None:
                    split[leaf] = "replicated_with_grad_allreduce"
            return split
    return None


def can_be_run(module: nn.Module) -> bool:
    """Return True if a module takes one tensor and is small enough to run in isolation."""
    if not takes_one_tensor(module):
        return False
    return count_parameters(module) <= MAX_PARAMETERS


def takes_one_tensor(module: nn.Module) -> bool:
    """Return True if a module runs in isolation, with random weights, on one tensor.

    Its forward requires one argument, it has no parameters outside its children, and the values
    of its buffers are available.
    """
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    required = []
    for parameter in parameters:
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variadic:
            required.append(parameter)
    return (
        len(required) == 1
        and required[0].kind is not inspect.Parameter.KEYWORD_ONLY
        and next(module.parameters(recurse=False), None) is None
        and all(buffer.device.type != "meta" for buffer in module.buffers())
    )


def _number_of_parts(module: nn.Module, counts: Sequence[str]) -> int | None:
    """Return the smallest number above 1 that divides every head count, or None."""
    values = [int(getattr(module, name)) for name in counts]
    for parts in range(2, min(values, default=2) + 1):
        if all(value % parts == 0 for value in values):
            return parts
    return None


def _adds_up(
    module: nn.Module, split: Mapping[str, Style], parts: int, counts: Sequence[str], width: int
) -> bool:
    """Return True if the outputs of the parts of a module add up to its output."""
    dtype = torch.float64
    tolerance = 1e-9
    if count_parameters(module) > _MAX_FLOAT64_PARAMETERS:
        dtype = torch.float32
        tolerance = 1e-3

    generator = torch.Generator().manual_seed(1)
    with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            full = _random_copy(module, dtype, generator)
            x = torch.randn(2, 5, width, dtype=dtype, generator=generator)
            expected = _output_tensor(full(x.clone()))
            total = torch.zeros_like(expected)
            for index in range(parts):
                part = _part_of(full, split, index, parts, counts)
                total += _output_tensor(part(x.clone()))
        except Exception:  # code that cannot run separately or in parts proves nothing
            return False
    return bool(((total - expected).abs().max() <= tolerance * expected.abs().max()).item())


def _random_copy(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """Copy a module to the CPU, in evaluation mode and with random parameters.

    The parameters are scaled so that the outputs are about as large as the inputs.
    """
    copied = copy.deepcopy(module).eval()
    # `to_empty` discards the values of buffers as well.
    buffers = {name: buffer.detach().to("cpu") for name, buffer in copied.named_buffers()}
    copied = copied.to_empty(device="cpu").to(dtype)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        if buffer.is_floating_point():
            buffer = buffer.to(dtype)
        direct_buffers(copied.get_submodule(owner))[leaf] = buffer

    for parameter in copied.parameters():
        parameter.requires_grad_(False)
        parameter.normal_(generator=generator)
        if parameter.ndim > 1:
            parameter.mul_(min(parameter.shape) ** -0.5)
    return copied


def _part_of(
    full: nn.Module, split: Mapping[str, Style], index: int, parts: int, counts: Sequence[str]
) -> nn.Module:
    """Return the part of a module on rank `index` of `parts` ranks. Its output is not summed.

    Only the first part adds the bias of the row-split layer. Replicated parameters are shared with
    `full`.
    """
    memo = {id(parameter): parameter for parameter in full.parameters()}
    part = copy.deepcopy(full, memo)
    for leaf, style in split.items():
        layer = part.get_submodule(leaf)
        for name, dim in split_dims(layer, style).items():
            parameter = direct_parameters(layer).get(name)
            if parameter is None:
                continue
            if dim is not None:
                lengths = shard_lengths(parameter.shape[dim], parts)
                shard = parameter.split(lengths, dim=dim)[index]
                direct_parameters(layer)[name] = nn.Parameter(shard, requires_grad=False)
            elif index > 0:
                direct_parameters(layer)[name] = None
        # Some code reads the size of a layer.
        for attribute in ("out_features", "nf") if style == "colwise" else ("in_features", "nx"):
            if hasattr(layer, attribute):
                size = int(getattr(layer, attribute))
                setattr(layer, attribute, shard_length(size, parts, index))
    for name in counts:
        setattr(part, name, int(getattr(part, name)) // parts)
    return part


def _output_tensor(output: object) -> torch.Tensor:
    """Return the only tensor of a module's output.

    Raises:
        ValueError: The output does not contain exactly one tensor.
    """
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple) and output:
        first, *others = output
        if isinstance(first, torch.Tensor) and all(entry is None for entry in others):
            return first
    raise ValueError("not one tensor")
