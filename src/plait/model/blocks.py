"""Which modules of a model are its repeated blocks: the units that are sharded, recomputed and compiled one by one."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from plait.errors import ModelError


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the blocks, in module order.

    With `patterns` (`fnmatch` style, e.g. `encoder.layers.*`): the modules that match; every pattern must match something, and of nested
    matches only the outermost counts. Without: the children of every outermost `nn.ModuleList` or `nn.Sequential` whose children are all of
    one class and which holds at least 5 % of the parameters (so an encoder and a decoder both count, a small stem does not). A model
    without such a list has no blocks and is one unit. A model may name its own as `pipeline_blocks`.
    """
    if patterns is not None:
        return _match(model, patterns)
    named: tuple[str, ...] | None = getattr(model, "pipeline_blocks", None)
    if named is not None:
        return named
    total = sum(p.numel() for p in model.parameters())
    blocks: list[str] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in lists):
            continue
        repeated = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and len({type(child) for child in module}) == 1
        if repeated and 0 < total <= 20 * sum(p.numel() for p in module.parameters()):
            lists.append(name)
            blocks += [f"{name}.{child}" if name else child for child, _ in module.named_children()]
    return tuple(blocks)


def _match(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = [name for name in names if name.count(".") == pattern.count(".")][:6]
            raise ModelError(
                f"parallel.blocks = {pattern!r}: no module has such a name; modules of that depth are {', '.join(close) or 'none'}"
            )
    # `*` also matches dots, so keep only the outermost of nested matches when one pattern gave both.
    blocks: list[str] = []
    for name in names:
        if any(fnmatchcase(name, pattern) for pattern in patterns) and not any(name.startswith(f"{outer}.") for outer in blocks):
            blocks.append(name)
    return tuple(blocks)
