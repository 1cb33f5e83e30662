"""Refusal of hooks and parametrizations on modules that tensor parallelism splits.

A hook on such a module would receive this rank's part instead of the full tensor, and its results
would differ from those of one process. Hooks that exist at the start are refused before a process
group exists, and hooks that are added later are refused in the forward. Hooks that receive full
tensors are allowed: those on the input of a column-parallel layer, on the output of a row-parallel
layer, and on modules that contain both layers. Hooks of Plait, torch and Transformers are always
allowed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from plait._torch.modules import (
    DROPOUTS,
    HookKind,
    direct_children,
    direct_parameters,
    has_gradient_hooks,
    hooks_of,
)
from plait.errors import ModelError
from plait.model.layers import Style
from plait.model.plans import TensorPlan
from plait.model.sequence import is_inside

HookedModule = tuple[str, nn.Module, tuple[HookKind, ...], str]
"""(name, module, kinds of its hooks that would receive a part, description of what is split)."""
_SUPPORTED_PACKAGES = ("plait", "torch", "transformers")
"""Packages whose hooks support shards."""
_BEFORE: tuple[HookKind, ...] = ("forward_pre",)
_AFTER: tuple[HookKind, ...] = ("forward",)
_BACKWARD: tuple[HookKind, ...] = ("backward", "backward_pre")
_SPLIT_BY_STYLE: dict[Style, tuple[tuple[HookKind, ...], str]] = {
    "colwise": ((*_AFTER, *_BACKWARD), "outputs"),
    "kv_replicated": ((*_AFTER, *_BACKWARD), "outputs"),
    "rowwise": ((*_BEFORE, *_BACKWARD), "inputs"),
    "replicated_with_grad_allreduce": ((*_BEFORE, *_AFTER, *_BACKWARD), "heads or channels"),
}
"""Kinds of hooks that would receive a part, and what is split, by the style of a module."""
_ALL = (*_BEFORE, *_AFTER, *_BACKWARD)


def refuse_hooks(
    model: nn.Module, plan: TensorPlan, *, blocks: tuple[str, ...], sequence_parallel: bool
) -> None:
    """Refuse hooks that would receive part of a tensor, and hooks on parameters that are split.

    Args:
        model: The model of the user.
        plan: The plan of tensor parallelism.
        blocks: Names of the repeated blocks.
        sequence_parallel: Whether hidden states are sharded along the sequence.

    Raises:
        ModelError: A hook is refused. The error names the module or parameter, and a remedy.
    """
    for hooked in _hooked_modules(model, plan, blocks=blocks, sequence_parallel=sequence_parallel):
        _refuse(*hooked)
    for name, parameter in model.named_parameters():
        if plan.dims[name] is not None and has_gradient_hooks(parameter):
            raise ModelError(
                f"{name} has a hook, but tensor parallelism replaces this parameter with its shard;"
                " register the hook on the sharded model's parameter, after plait.initialize, or"
                " use parallel.tp = 1"
            )


def watch(
    model: nn.Module, plan: TensorPlan, *, blocks: tuple[str, ...], sequence_parallel: bool
) -> None:
    """Make split layers refuse hooks and parametrizations that were added after the split.

    A layer checks itself and the modules around it when it is called. Call this function last,
    because it wraps the current `forward` of the layers.
    """
    layers = {
        name for name, style in plan.styles.items() if style != "replicated_with_grad_allreduce"
    }
    modules_of_layer: dict[str, list[HookedModule]] = {}
    for hooked in _hooked_modules(model, plan, blocks=blocks, sequence_parallel=sequence_parallel):
        name = hooked[0]
        layer = name if name in layers else _first_layer(name, layers)
        if layer is not None:
            modules_of_layer.setdefault(layer, []).append(hooked)
    for name in layers:
        module = model.get_submodule(name)
        module.forward = _check_first(name, module, module.forward, modules_of_layer.get(name, []))


def _first_layer(name: str, layers: set[str]) -> str | None:
    """Return a split layer in the module `name` or in its parent, or None if there is none."""
    for scope in (name, name.rpartition(".")[0]):
        if not scope:
            continue
        for layer in sorted(layers):
            if layer.startswith(f"{scope}."):
                return layer
    return None


def _check_first(
    name: str,
    module: nn.Module,
    forward: Callable[..., Any],
    hooked_modules: Sequence[HookedModule],
) -> Callable[..., Any]:
    """Return a layer's forward that first checks the hooks of modules around the layer."""
    # These are torch's dictionaries of the hooks. A forward only tests whether one has entries.
    hooks = tuple(
        hooks_of(hooked, kind) for _, hooked, kinds, _ in hooked_modules for kind in kinds
    )

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(hooks):
            for hooked in hooked_modules:
                _refuse(*hooked)
        if "weight" not in direct_parameters(module) or "parametrizations" in direct_children(
            module
        ):
            raise ModelError(
                f"{name}: its weight is no longer a parameter of the layer (a parametrization,"
                " weight_norm, spectral_norm or pruning was applied after tensor parallelism had"
                " split it); apply this change before plait.initialize, and either set a"
                " parallel.plan that leaves the layer out or use parallel.tp = 1"
            )
        return forward(*args, **kwargs)

    return run


def _hooked_modules(
    model: nn.Module, plan: TensorPlan, *, blocks: tuple[str, ...], sequence_parallel: bool
) -> Iterator[HookedModule]:
    styles = plan.styles
    inside = {
        inner
        for name, style in styles.items()
        if style in ("colwise", "kv_replicated")
        for inner in _between(model, name)
    }
    for name, module in model.named_modules():
        in_blocks = name in blocks or is_inside(name, blocks)
        if (
            sequence_parallel
            and (name in plan.norms or in_blocks)
            and not is_inside(name, plan.all_token_modules)
        ):
            kinds = _ALL
            # The output of the last module with sequence shards is gathered before its hooks.
            if name == (plan.final_norm or blocks[-1]):
                kinds = (*_BEFORE, *_BACKWARD)
            yield name, module, kinds, "the sequence"
        elif name in styles:
            if styles[name] in _SPLIT_BY_STYLE:
                yield name, module, *_SPLIT_BY_STYLE[styles[name]]
        elif name in inside and next(module.children(), None) is None:
            yield name, module, _ALL, "the features"


def _between(model: nn.Module, layer: str) -> Iterator[str]:
    """Yield the names of modules without parameters next to a column-parallel layer.

    Such a module is an activation function, for example. Dropouts are excluded, because they may
    follow the row-parallel layer, whose output is unsharded.
    """
    parent = layer.rpartition(".")[0]
    for leaf, child in model.get_submodule(parent).named_children():
        if isinstance(child, DROPOUTS) or next(child.parameters(), None) is not None:
            continue
        yield f"{parent}.{leaf}" if parent else leaf


def _refuse(name: str, module: nn.Module, kinds: tuple[HookKind, ...], split_values: str) -> None:
    for kind in kinds:
        for hook in hooks_of(module, kind).values():
            if is_foreign(hook):
                shown = getattr(hook, "__qualname__", type(hook).__qualname__)
                raise ModelError(
                    f"{name}: the {kind.replace('_', ' ')} hook {shown} would receive only this"
                    f" rank's part of {split_values}, because tensor parallelism splits the"
                    f" computation there; hook {_remedy(name, split_values)}"
                )


def _remedy(name: str, split_values: str) -> str:
    if split_values == "the sequence":
        return (
            "the final norm or the model, whose outputs are unsharded, or use"
            " parallel.sequence_parallel = false"
        )
    parent = name.rpartition(".")[0]
    container = "a module around it"
    if parent:
        container = f"{parent}, whose inputs and outputs are unsharded"
    return f"{container}, or use parallel.tp = 1"


def is_foreign(hook: Any) -> bool:
    """Return True if a hook is the user's, and not one of Plait, torch or Transformers."""
    # A partial function has the module of functools.
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] not in _SUPPORTED_PACKAGES
