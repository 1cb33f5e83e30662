"""Rules for a transformer that nobody has written any for, proposed from its structure.

A module that owns a few linear layers is taken alone, on the CPU, with random weights: if the outputs of its parts, each with a slice of the
columns and of the rows, add up to its output, then that split is right, whatever its code does in between. Where that cannot be tried, an MLP is known by its layers'
names and shapes, and every other layer is split with its output gathered, which is right for any layer that is called as a module. A layer about
which neither holds stays whole. The caller compares forward and backward of the whole plan on a tiny copy of the model before it relies on it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from plait.errors import ModelError
from plait.model.heads import HEADS, KV_HEADS, count_attributes
from plait.model.layers import in_features, is_embedding, is_linear, is_norm, out_features
from plait.model.rules import Rule, Style, matches

OUT_NAMES = frozenset({"o_proj", "out_proj", "dense", "o", "wo", "to_out", "o_lin", "out_lin", "linear_out", "proj", "c_proj", "out"})
UP_NAMES = frozenset(
    {"up", "up_proj", "gate", "gate_proj", "gate_up", "fc1", "fc_in", "w1", "w3", "c_fc", "dense_h_to_4h", "lin1", "linear1"}
    | {"fc", "wi", "wi_0", "wi_1", "intermediate", "w_in", "proj_in", "linear_in", "ff1", "c_gate", "w_gate", "w_up"}
)
DOWN_NAMES = frozenset(
    {"down", "down_proj", "fc2", "fc_out", "w2", "c_proj", "dense_4h_to_h", "lin2", "linear2", "wo", "output"}
    | {"proj", "out", "w_out", "proj_out", "linear_out", "ff2", "w_down"}
)
_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Transformer)
"""torch's own modules that hand their children's weights to fused kernels without calling the children."""
_MOST_NUMBERS = 2**28
"""Parameters of a module that is tried, at most: 1 GiB of float32, twice."""
_FLOAT64_NUMBERS = 2**22
"""Up to here it is tried in float64."""

Layers = Mapping[str, nn.Module]
Split = dict[str, Style]


def guess_rules(model: nn.Module, blocks: Sequence[str]) -> tuple[Rule, ...]:
    """Rules for `model`, looking inside `blocks` (or everywhere, without blocks), and at an embedding and head of one vocabulary.

    Raises ModelError when nothing can be split.
    """
    found: Split = {}
    tried: dict[object, Split | None] = {}
    for block in blocks or ("",):
        root = model.get_submodule(block)
        for name, module in _owners(root, block):
            layers = {leaf: child for leaf, child in module.named_children() if is_linear(child)}
            for leaf, style in _split_of(module, layers, tried).items():
                found[f"{name}.{leaf}" if name else leaf] = style
    if not found:
        where = f"the blocks {blocks[0]} to {blocks[-1]}" if blocks else type(model).__name__
        raise ModelError(
            f"no plan is known for {type(model).__name__}, and no layer of {where} is an nn.Linear that is called as a module; give parallel.plan as "
            f"{{pattern: style}}, or use parallel.tp = 1"
        )
    found.update(_vocabulary(model, found))
    return _as_patterns(model, found)


def _owners(root: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules that own linear layers, without those that use their children's weights themselves."""
    hidden: list[str] = []
    for name, module in root.named_modules(prefix=prefix):
        if any(name == outer or name.startswith(f"{outer}.") for outer in hidden):
            continue
        if isinstance(module, _READS_WEIGHTS):
            hidden.append(name)
        elif any(is_linear(child) for child in module.children()):
            yield name, module


def _split_of(module: nn.Module, layers: Layers, tried: dict[object, Split | None]) -> Split:
    """The best split of one module's layers that can be justified."""
    key = _signature(module)
    if key not in tried:
        tried[key] = _proven(module, layers)
    proven = tried[key]
    if proven is not None:
        return proven
    return (_mlp_by_name(layers) if not _can_be_tried(module) else None) or _gathered(layers)


def _signature(module: nn.Module) -> object:
    """Equal for modules that behave alike: class, children and sizes, and every plain number that steers them."""
    parameters = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    parts = tuple((name, type(part)) for name, part in module.named_modules())
    numbers = tuple(
        (name, attribute, value)
        for name, part in module.named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, int | float | str)
    )
    return type(module), parameters, parts, numbers


# ---- proof by trial -------------------------------------------------------------------------------------------------------------------


def _proven(module: nn.Module, layers: Layers) -> Split | None:
    """Columns and one row-split layer whose parts add up to the whole, if there are such."""
    if not 2 <= len(layers) <= 6 or not _can_be_tried(module):
        return None
    counted = [name for name in count_attributes(module) if name in (*HEADS, *KV_HEADS)]
    for counts in (counted, []) if counted else ([],):
        parts = _parts(module, counts)
        for row in reversed(list(layers)):
            columns = [leaf for leaf in layers if leaf != row]
            width = in_features(layers[columns[0]])
            if any(in_features(layers[leaf]) != width for leaf in columns) or out_features(layers[row]) != width or parts is None:
                continue
            split: Split = {**dict.fromkeys(columns, "colwise"), row: "rowwise"}
            if _adds_up(module, split, parts, counts, width):
                # Whatever else it owns is used by every part, so its gradient is a sum over parts.
                rest = [leaf for leaf, child in module.named_children() if leaf not in split and next(child.parameters(), None) is not None]
                return {**split, **dict.fromkeys(rest, "replicated_with_grad_allreduce")} if _counts_agree(counted, counts) else None
    return None


def _counts_agree(counted: Sequence[str], used: Sequence[str]) -> bool:
    """The plan changes every head count of a guessed module: a proof without that change is none for it."""
    return not counted or bool(used)


def _parts(module: nn.Module, counts: Sequence[str]) -> int | None:
    """Into how many parts to cut: the smallest number above 1 that divides every head count; None without one."""
    values = [int(getattr(module, name)) for name in counts]
    return next((parts for parts in range(2, min(values, default=2) + 1) if all(value % parts == 0 for value in values)), None)


def _can_be_tried(module: nn.Module) -> bool:
    """Whether it can run alone: one tensor in, all its state known, and small enough."""
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return False
    required = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    own_parameters = next(module.parameters(recurse=False), None) is not None
    unknown_state = any(buffer.device.type == "meta" for buffer in module.buffers())
    return len(required) == 1 and not own_parameters and not unknown_state and sum(p.numel() for p in module.parameters()) <= _MOST_NUMBERS


def _adds_up(module: nn.Module, split: Split, parts: int, counts: Sequence[str], width: int) -> bool:
    size = sum(parameter.numel() for parameter in module.parameters())
    dtype, tolerance = (torch.float64, 1e-9) if size <= _FLOAT64_NUMBERS else (torch.float32, 1e-3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            whole = _random_copy(module, dtype, generator)
            x = torch.randn(2, 5, width, dtype=dtype, generator=generator)
            expected = _output(whole(x))
            total = torch.zeros_like(expected)
            for part in range(parts):
                total += _output(_part(whole, split, part, parts, counts)(x.clone()))
        except Exception:  # noqa: BLE001  unknown code that cannot run alone, or not in parts, proves nothing
            return False
    return total.shape == expected.shape and bool(((total - expected).abs().max() <= tolerance * expected.abs().max()).item())


def _random_copy(module: nn.Module, dtype: torch.dtype, generator: torch.Generator) -> nn.Module:
    """On the CPU, in evaluation mode, with random parameters of the size that a layer's outputs keep that of its inputs."""
    meta = copy.deepcopy(module).eval()
    buffers = {name: buffer.detach().to("cpu") for name, buffer in meta.named_buffers()}
    made = meta.to_empty(device="cpu").to(dtype)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        made.get_submodule(owner)._buffers[leaf] = buffer.to(dtype) if buffer.is_floating_point() else buffer
    for parameter in made.parameters():
        parameter.requires_grad_(False)
        parameter.normal_(generator=generator)
        if parameter.ndim > 1:
            parameter.mul_(min(parameter.shape) ** -0.5)
    return made


def _part(whole: nn.Module, split: Split, part: int, parts: int, counts: Sequence[str]) -> nn.Module:
    """What one of `parts` ranks would compute, without the sum over ranks. The first adds the row-split layer's bias."""
    shared = {id(parameter): parameter for parameter in whole.parameters()}
    own = copy.deepcopy(whole, dict(shared))  # parameters are not copied
    for leaf, style in split.items():
        layer = copy.copy(own.get_submodule(leaf))
        layer._parameters = dict(layer._parameters)
        from plait.model.layers import split_dims

        for name, dim in split_dims(layer, style).items():
            parameter = layer._parameters.get(name)
            if parameter is None:
                continue
            if dim is not None:
                chunks = parameter.tensor_split(_cuts(parameter.shape[dim], parts), dim=dim)
                layer._parameters[name] = nn.Parameter(chunks[part], requires_grad=False)
            elif part:
                layer._parameters[name] = None
        _set_width(layer, "out" if style == "colwise" else "in", parts, part)
        own._modules[leaf] = layer
    for name in counts:
        setattr(own, name, getattr(own, name) // parts)
    return own


def _cuts(length: int, parts: int) -> list[int]:
    """Where torch.chunk's rule cuts."""
    chunk = -(-length // parts)
    return [min(chunk * index, length) for index in range(1, parts)]


def _set_width(layer: nn.Module, side: str, parts: int, part: int) -> None:
    """Keep the layer's own sizes true, for code that reads them."""
    name = {"in": ("in_features", "nx"), "out": ("out_features", "nf")}[side]
    for attribute in name:
        if hasattr(layer, attribute):
            length = int(getattr(layer, attribute))
            edges = [0, *_cuts(length, parts), length]
            setattr(layer, attribute, edges[part + 1] - edges[part])


def _output(result: object) -> torch.Tensor:
    """The one tensor that a module returned. Raises ValueError where it returned more: their meaning is unknown."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, tuple) and result and isinstance(result[0], torch.Tensor) and all(other is None for other in result[1:]):
        return result[0]
    raise ValueError("not one tensor")


# ---- by names, and what is always right -----------------------------------------------------------------------------------------------


def _mlp_by_name(layers: Layers) -> Split | None:
    """The usual names of an MLP, with shapes that fit: every up reads the width, the one down reads what all ups make."""
    ups = [leaf for leaf in layers if leaf in UP_NAMES]
    downs = [leaf for leaf in layers if leaf in DOWN_NAMES]
    if not ups or len(downs) != 1:
        return None
    down = layers[downs[0]]
    if any((in_features(layers[up]), out_features(layers[up])) != (out_features(down), in_features(down)) for up in ups):
        return None
    return {**dict.fromkeys(ups, "colwise"), downs[0]: "rowwise", **_gathered({k: v for k, v in layers.items() if k not in (*ups, *downs)})}


def _gathered(layers: Layers) -> Split:
    """Right for any layer. The one that by its name comes last takes slices of its input, so its output is summed, not gathered."""
    split: Split = dict.fromkeys(layers, "colwise_gather_output")
    last = [leaf for leaf in layers if leaf in OUT_NAMES | DOWN_NAMES]
    if len(layers) > 1 and len(last) == 1:
        split[last[0]] = "rowwise_split_input"
    return split


def _vocabulary(model: nn.Module, found: Split) -> Split:
    """A head and the embedding of the same vocabulary: both called as modules, both split along it."""
    outside = {name: module for name, module in model.named_modules() if name not in found}
    embeddings = {name: module for name, module in outside.items() if is_embedding(module)}
    for name, module in outside.items():
        if not is_linear(module):
            continue
        sizes = (out_features(module), in_features(module))
        fitting = [other for other, embedding in embeddings.items() if tuple(embedding.get_parameter("weight").shape) == sizes]
        if len(fitting) == 1:
            return {fitting[0]: "embedding_rowwise", name: "vocab_head"}
    return {}


def _as_patterns(model: nn.Module, found: Split) -> tuple[Rule, ...]:
    """One rule for the same layer of every block, where the blocks agree; names where they do not."""
    patterns: dict[str, list[str]] = {}
    for name in found:
        patterns.setdefault(".".join("*" if part.isdigit() else part for part in name.split(".")), []).append(name)
    names = [name for name, _ in model.named_modules()]
    rules = []
    for pattern, members in patterns.items():
        agree = len({found[name] for name in members}) == 1 and set(members) == {name for name in names if matches(name, pattern)}
        rules += [Rule(pattern, found[members[0]])] if agree else [Rule(name, found[name]) for name in members]
    return tuple(rules)


__all__ = ["chain", "guess_rules", "is_norm"]
