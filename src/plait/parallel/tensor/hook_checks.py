"""Hooks and parametrizations of modules that tensor parallelism computes in parts: a hook would get
this rank's part in place of the full tensor, and compute other values than one process. Refused by
name: before a process group exists for what is there, in the forward for what comes later. Hooks
that see full tensors stay (in front of a column-split layer, behind a row-split one, on the
containers around both), and so do Plait's, torch's and Transformers' own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from plait._torch.modules import (
    DROPOUTS,
    HookKind,
    has_gradient_hooks,
    hooks_of,
    own_children,
    own_parameters,
)
from plait.errors import ModelError
from plait.model.plans import TensorPlan
from plait.model.rules import Style
from plait.model.sequence import is_inside

Part = tuple[str, nn.Module, tuple[HookKind, ...], str]
"""A module, those of its hooks that are given a part, and of what."""
_OWN = ("plait", "torch", "transformers")
"""Packages whose hooks know of shards, or are answered elsewhere (`outputs`)."""
_BEFORE: tuple[HookKind, ...] = ("forward_pre",)
_AFTER: tuple[HookKind, ...] = ("forward",)
_BACKWARD: tuple[HookKind, ...] = ("backward", "backward_pre")
_SEES: dict[Style, tuple[tuple[HookKind, ...], str]] = {
    "colwise": ((*_AFTER, *_BACKWARD), "outputs"),
    "kv_replicated": ((*_AFTER, *_BACKWARD), "outputs"),
    "rowwise": ((*_BEFORE, *_BACKWARD), "inputs"),
    "replicated_with_grad_allreduce": ((*_BEFORE, *_AFTER, *_BACKWARD), "heads or channels"),
}
"""Which hooks of a module with a style are given a part, and of what."""
_ALL = (*_BEFORE, *_AFTER, *_BACKWARD)


def refuse_hooks(
    model: nn.Module, plan: TensorPlan, *, blocks: tuple[str, ...], sequence_parallel: bool
) -> None:
    """Raise ModelError for a hook that would be given a part, and for one on a parameter that is
    replaced by its shard.
    """
    for part in _parts(model, plan, blocks=blocks, sequence_parallel=sequence_parallel):
        _refuse(*part)
    for name, parameter in model.named_parameters():
        if plan.dims[name] is not None and has_gradient_hooks(parameter):
            raise ModelError(
                f"{name} has a hook, and tensor parallelism replaces this parameter by its shard;"
                " register the hook on the sharded model's parameter, after plait.initialize, or"
                " use parallel.tp = 1"
            )


def watch(
    model: nn.Module, plan: TensorPlan, *, blocks: tuple[str, ...], sequence_parallel: bool
) -> None:
    """Refuse what is put on later, when the layer, or the part that holds it, is next called. Last:
    it wraps what `forward` is now.
    """
    styles = plan.styles
    parts = list(_parts(model, plan, blocks=blocks, sequence_parallel=sequence_parallel))
    linear = {name for name, style in styles.items() if style != "replicated_with_grad_allreduce"}
    of_layer: dict[str, list[Part]] = {}
    for part in parts:
        owner = part[0] if part[0] in linear else _first_layer(part[0], linear)
        if owner is not None:
            of_layer.setdefault(owner, []).append(part)
    for name in linear:
        module = model.get_submodule(name)
        module.forward = _watched(name, module, module.forward, of_layer.get(name, []))


def _first_layer(name: str, linear: set[str]) -> str | None:
    """A split layer that is called whenever the module `name` is: in it, or next to it."""
    for scope in (name, name.rpartition(".")[0]):
        found = next((layer for layer in sorted(linear) if layer.startswith(f"{scope}.")), None)
        if scope and found is not None:
            return found
    return None


def _watched(
    name: str, module: nn.Module, forward: Callable[..., Any], parts: Sequence[Part]
) -> Callable[..., Any]:
    watched = tuple(hooks_of(part, kind) for _, part, kinds, _ in parts for kind in kinds)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(watched):
            for part in parts:
                _refuse(*part)
        if "weight" not in own_parameters(module) or "parametrizations" in own_children(module):
            raise ModelError(
                f"{name}: its weight is no longer a parameter of the layer (a parametrization,"
                " weight_norm, spectral_norm or pruning was put on after tensor parallelism had"
                " split it); use parallel.tp = 1, or a parallel.plan that leaves the layer out,"
                " and put it on before plait.initialize"
            )
        return forward(*args, **kwargs)

    return run


def _parts(
    model: nn.Module, plan: TensorPlan, *, blocks: tuple[str, ...], sequence_parallel: bool
) -> Iterator[Part]:
    styles = plan.styles
    inside = {
        inner
        for name, style in styles.items()
        if style in ("colwise", "kv_replicated")
        for inner in _between(model, name, plan)
    }
    for name, module in model.named_modules():
        in_blocks = name in blocks or is_inside(name, blocks)
        if (
            sequence_parallel
            and (name in plan.norms or in_blocks)
            and not is_inside(name, plan.whole)
        ):
            behind_the_end = name == plan.final_norm or (
                plan.final_norm is None and name == blocks[-1]
            )
            yield name, module, (*_BEFORE, *_BACKWARD) if behind_the_end else _ALL, "the sequence"
        elif name in styles:
            if styles[name] in _SEES:
                yield name, module, *_SEES[styles[name]]
        elif name in inside and next(module.children(), None) is None:
            yield name, module, _ALL, "the features"


def _between(model: nn.Module, layer: str, plan: TensorPlan) -> Iterator[str]:
    """Modules next to a column-parallel layer that no style names and that hold no parameters, such
    as an activation function. Dropouts are not among them: they may follow the row-parallel layer,
    where tensors are unsharded.
    """
    parent = layer.rpartition(".")[0]
    for leaf, child in model.get_submodule(parent).named_children():
        if isinstance(child, DROPOUTS) or next(child.parameters(), None) is not None:
            continue
        yield f"{parent}.{leaf}" if parent else leaf


def _refuse(name: str, module: nn.Module, kinds: tuple[HookKind, ...], what: str) -> None:
    for kind in kinds:
        for hook in hooks_of(module, kind).values():
            if is_foreign(hook):
                shown = getattr(hook, "__qualname__", type(hook).__qualname__)
                raise ModelError(
                    f"{name}: the {kind.replace('_', ' ')} hook {shown} would be given this rank's"
                    f" part of {what} only, because tensor parallelism splits the computation"
                    f" there; hook {_remedy(name, what)}, or use {_other(what)}"
                )


def _remedy(name: str, what: str) -> str:
    parent = name.rpartition(".")[0]
    if what == "the sequence":
        return "the final norm or the model, whose outputs are unsharded"
    return f"{parent}, whose inputs and outputs are unsharded" if parent else "a module around it"


def _other(what: str) -> str:
    return "parallel.sequence_parallel = false" if what == "the sequence" else "parallel.tp = 1"


def is_foreign(hook: Any) -> bool:
    """Whether a hook is a user's: not Plait's, torch's or Transformers'."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] not in _OWN
