"""Which modules of a model are its repeated blocks: the units that are sharded, recomputed and
compiled one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from plait.errors import ModelError


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the blocks, in module order.

    With `patterns` (`fnmatch` style, e.g. `encoder.layers.*`): the modules that match; every
    pattern must match something, and of nested matches only the outermost counts. Without: the
    children of every outermost `nn.ModuleList` or `nn.Sequential` of repeated layers that holds at
    least 5 % of the parameters (so an encoder and a decoder both count, a small stem does not).
    Repeated are layers of one class, and in an `nn.ModuleList` those of several classes that take
    the same first argument (attention layers among state space layers). A model without such a list
    has no blocks and is one unit. A model may name its own as `pipeline_blocks`. Of a model that
    takes more than text, the language model's blocks count: a tower's layers (for images, for
    sound) are not in the chain that tokens pass through.
    """
    if patterns is not None:
        return _match(model, patterns)
    named: tuple[str, ...] | None = getattr(model, "pipeline_blocks", None)
    if named is not None:
        return named
    within = _language_models(model)
    beside = () if within else _towers(model)
    outside = {
        id(parameter) for tower in beside for parameter in model.get_submodule(tower).parameters()
    }
    inside = [
        parameter
        for name in within or ("",)
        for parameter in model.get_submodule(name).parameters()
    ]
    total = sum(p.numel() for p in inside if id(p) not in outside)
    blocks: list[str] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        if _is_in(name, (*beside, *lists)) or (within and not _is_in(name, within)):
            continue
        if _repeats(module) and 0 < total <= 20 * sum(p.numel() for p in module.parameters()):
            lists.append(name)
            blocks += [f"{name}.{child}" if name else child for child, _ in module.named_children()]
    return tuple(blocks)


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _language_models(model: nn.Module) -> tuple[str, ...]:
    """Names of the outermost modules that take text alone, in a model that takes more than text;
    Transformers' models say so.
    """
    return _outermost(model, lambda kinds: kinds == ("text",)) if len(_inputs(model)) > 1 else ()


def _towers(model: nn.Module) -> tuple[str, ...]:
    """Names of the outermost modules that take no text, in a model that takes text."""
    return (
        _outermost(model, lambda kinds: bool(kinds) and "text" not in kinds)
        if "text" in _inputs(model)
        else ()
    )


def _outermost(model: nn.Module, wanted: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    found: list[str] = []
    for name, module in model.named_modules():
        if not _is_in(name, found) and wanted(_inputs(module)):
            found.append(name)
    return tuple(found)


def _inputs(module: nn.Module) -> tuple[str, ...]:
    kinds = getattr(type(module), "input_modalities", ())
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def _repeats(module: nn.Module) -> bool:
    """Whether a module is a list of layers that are used one like the other."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    kinds = {type(child) for child in module}
    if len(kinds) == 1:
        return True
    # Parts of one layer (a convolution, an activation) stand in a Sequential, or are torch's own; a
    # list of an encoder and a decoder takes different arguments.
    composed = isinstance(module, nn.ModuleList) and all(
        next(child.children(), None) is not None for child in module
    )
    return (
        composed
        and len(kinds) < len(module) + (len(module) == 2)
        and len({_first_argument(kind) for kind in kinds} - {None}) == 1
    )


def _first_argument(kind: type[nn.Module]) -> str | None:
    """Name of what a module's forward takes; None where that cannot be read."""
    try:
        names = [name for name in inspect.signature(kind.forward).parameters if name != "self"]
    except (TypeError, ValueError):
        return None
    return names[0] if names else None


def _match(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = [name for name in names if name.count(".") == pattern.count(".")][:6]
            raise ModelError(
                f"parallel.blocks = {pattern!r}: no module has such a name; modules of that depth"
                f" are {', '.join(close) or 'none'}"
            )
    # `*` also matches dots, so keep only the outermost of nested matches when one pattern gave
    # both.
    blocks: list[str] = []
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in patterns) and not any(
            name.startswith(f"{outer}.") for outer in blocks
        ):
            blocks.append(name)
    return tuple(blocks)
