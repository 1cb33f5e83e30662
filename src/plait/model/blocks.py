"""Search for the repeated blocks of a model.

Blocks are the units that are sharded, recomputed and compiled one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from plait.errors import ModelError
from plait.model.layers import count_parameters


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """Return the full names of the repeated blocks of a model, in module order.

    Without patterns, the blocks are the children of every outermost `nn.ModuleList` or
    `nn.Sequential` of repeated layers that has at least 5 % of the parameters. Therefore the layers
    of both an encoder and a decoder are blocks, and those of a small stem are not. Layers are
    regarded as repeated if all have the same class. In an `nn.ModuleList`, several classes are
    allowed if their forwards take the same first argument (e.g. attention and state space layers).
    A model without such a list has no blocks and is a single unit.

    A model can name its blocks itself in an attribute `pipeline_blocks`. In a model with several
    input modalities, only layers of the language model are blocks: the layers of an image or audio
    tower are not in the chain that tokens pass through.

    Args:
        model: The model, on any device.
        patterns: Names of the blocks with `*` as in file names, e.g. `encoder.layers.*`. Every
            pattern must match a module. Of nested matches, the outermost is used.

    Raises:
        ModelError: A pattern matches no module.
    """
    if patterns is not None:
        return _matching_modules(model, patterns)
    named: tuple[str, ...] | None = getattr(model, "pipeline_blocks", None)
    if named is not None:
        return named

    # The share of a list is computed without the towers, which may have most of the parameters.
    language_models = _language_models(model)
    towers: tuple[str, ...] = ()
    if not language_models:
        towers = _towers(model)
    total = _count_parameters(model, language_models or ("",), excluded=towers)
    if total == 0:
        return ()

    blocks: list[str] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        if _is_in(name, (*towers, *lists)):
            continue
        if language_models and not _is_in(name, language_models):
            continue
        # At least 5 % of the parameters, which leaves out the stem of a vision model.
        if _repeats(module) and total <= 20 * count_parameters(module):
            lists.append(name)
            for child, _ in module.named_children():
                blocks.append(f"{name}.{child}".removeprefix("."))
    return tuple(blocks)


def block_index(name: str, blocks: Sequence[str]) -> int:
    """Return the index of the block that contains a parameter, or -1 if none does."""
    for index, block in enumerate(blocks):
        if name.startswith(f"{block}."):
            return index
    return -1


def _count_parameters(model: nn.Module, included: Sequence[str], excluded: Sequence[str]) -> int:
    """Return the number of parameters of some modules, without those of the excluded modules."""
    excluded_ids: set[int] = set()
    for name in excluded:
        excluded_ids.update(id(parameter) for parameter in model.get_submodule(name).parameters())

    total = 0
    for name in included:
        for parameter in model.get_submodule(name).parameters():
            if id(parameter) not in excluded_ids:
                total += parameter.numel()
    return total


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _language_models(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the outermost text-only modules of a model with several modalities."""
    if len(_input_modalities(model)) < 2:
        return ()
    return _outermost(model, lambda modalities: modalities == ("text",))


def _towers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the outermost modules without text input, in a model with text input."""
    if "text" not in _input_modalities(model):
        return ()
    return _outermost(model, lambda modalities: bool(modalities) and "text" not in modalities)


def _outermost(model: nn.Module, accepts: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    names: list[str] = []
    for name, module in model.named_modules():
        if not _is_in(name, names) and accepts(_input_modalities(module)):
            names.append(name)
    return tuple(names)


def _input_modalities(module: nn.Module) -> tuple[str, ...]:
    """Return the input modalities that a Transformers class declares, or an empty tuple."""
    modalities = getattr(type(module), "input_modalities", ())
    if isinstance(modalities, str):
        return (modalities,)
    return tuple(modalities)


def _repeats(module: nn.Module) -> bool:
    """Return True if a module is a list of layers that are used in the same way."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    classes = {type(child) for child in module}
    if len(classes) == 1:
        return True

    # Several classes can also be the parts of a single layer (a convolution and an activation).
    # Those are in an nn.Sequential, or have no children because they are layers of torch.
    if not isinstance(module, nn.ModuleList):
        return False
    if any(next(child.children(), None) is None for child in module):
        return False
    if len(module) > 2 and len(classes) == len(module):
        return False
    # An encoder and a decoder in one list differ in their arguments.
    first_arguments = {_first_argument(layer_class) for layer_class in classes}
    return len(first_arguments - {None}) == 1


def _first_argument(module_class: type[nn.Module]) -> str | None:
    """Return the name of the first argument of a class's forward, or None if it is unknown."""
    try:
        names = list(inspect.signature(module_class.forward).parameters)
    except (AttributeError, TypeError, ValueError):  # AttributeError: a layer of torch.jit.script
        return None
    names = [name for name in names if name != "self"]
    return names[0] if names else None


def _matching_modules(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        same_depth = [name for name in names if name.count(".") == pattern.count(".")][:6]
        raise ModelError(
            f"parallel.blocks = {pattern!r}: no module has such a name; modules of that depth"
            f" are {', '.join(same_depth) or 'none'}"
        )

    # `*` matches dots as well, so one pattern can match a module and the modules inside it.
    blocks: list[str] = []
    for name in names:
        if _is_in(name, blocks):
            continue
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            blocks.append(name)
    return tuple(blocks)
