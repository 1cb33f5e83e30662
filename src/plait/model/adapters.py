"""Low-rank adapters (PEFT's LoRA) in a model that tensor parallelism splits: their part of the
plan.

An adapted layer is a wrapper with the layer as `base_layer` and matrices A [r, in] and B [out, r],
and computes base(x) + s B A x. The plan is made for the model without wrappers. Then a column-split
layer has B split as its own columns, and every rank computes A x; a row-split layer has A split as
its own rows, and the r-wide products are summed. Names follow PEFT's: nothing of it is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from plait.errors import ModelError

_BASE = "base_layer"
_REMEDY = "use parallel.tp = 1, with ZeRO or a pipeline"


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Wrapper of every adapted layer by the layer's name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, _BASE, None), nn.Module)
    }


def copied_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the wrappers of layers that are trained in full (PEFT's
    `modules_to_save`).
    """
    return tuple(
        name
        for name, module in model.named_modules()
        if hasattr(module, "original_module")
        and isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict)
    )


def adapters_of(model: Any) -> tuple[str, ...]:
    """Return the names of the adapters that PEFT has put on a model; none for any other model."""
    return tuple(getattr(model, "peft_config", ()))


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the model that PEFT's `get_peft_model` wraps, or any other model itself."""
    return cast("Any", model).get_base_model() if adapters_of(model) else model


@contextmanager
def without_adapters(model: nn.Module, wrappers: Mapping[str, nn.Module]) -> Iterator[None]:
    """The model with the layers themselves in their places."""
    for name, wrapper in wrappers.items():
        _put(model, name, wrapper.get_submodule(_BASE))
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            _put(model, name, wrapper)


@contextmanager
def with_adapters_enabled(model: nn.Module) -> Iterator[None]:
    """Enable the adapters that PEFT's `disable_adapter` has disabled, and with them the gradients
    of their parameters.

    Modules may be replaced inside of the context. At its end, the adapters are disabled again.
    """
    disabled = [name for name, module in model.named_modules() if _is_disabled(module)]
    _enable_adapters(model, disabled, enabled=True)
    try:
        yield
    finally:
        _enable_adapters(model, disabled, enabled=False)


def _is_disabled(module: nn.Module) -> bool:
    return hasattr(module, "enable_adapters") and getattr(module, "disable_adapters", False) is True


def _enable_adapters(model: nn.Module, names: Iterable[str], *, enabled: bool) -> None:
    modules = dict(model.named_modules())
    for name in names:
        if name in modules:  # a pipeline stage keeps only its own blocks
            cast("Any", modules[name]).enable_adapters(enabled)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def base_name(name: str, wrappers: Mapping[str, nn.Module]) -> str:
    """What a module or parameter of the model without adapters is called in the one with them."""
    for wrapped in wrappers:
        if name == wrapped or name.startswith(f"{wrapped}."):
            return f"{wrapped}.{_BASE}{name[len(wrapped) :]}"
    return name


def split_adapters(name: str, wrapper: nn.Module, style: str | None) -> dict[str, str]:
    """The modules of an adapter that are split too, by their full name, and how. `style` is the
    layer's. Raises ModelError for an adapter that would not be right so.
    """
    _refuse_unknown(name, wrapper)
    if style is None:
        return {}
    if style not in ("colwise", "rowwise"):
        raise ModelError(
            f"parallel.tp: the adapter of {name} stands on a layer with the style {style!r}; leave"
            f" it out of it, or {_REMEDY}"
        )
    side = "lora_B" if style == "colwise" else "lora_A"
    return {
        f"{name}.{side}.{adapter}": style
        for adapter, _ in wrapper.get_submodule(side).named_children()
    }


def _refuse_unknown(name: str, wrapper: nn.Module) -> None:
    kind = type(wrapper).__name__
    children = {
        leaf
        for leaf, child in wrapper.named_children()
        if next(child.parameters(), None) is not None
    }
    if not {"lora_A", "lora_B"} <= children or any(
        type(one) is not nn.Linear for one in _matrices(wrapper)
    ):
        raise ModelError(
            f"parallel.tp: {name} is {kind}, an adapter around a layer, and only LoRA on linear"
            f" layers is split; {_REMEDY}"
        )
    if others := sorted(children - {_BASE, "lora_A", "lora_B"}):
        raise ModelError(
            f"parallel.tp: the adapter of {name} has {', '.join(others)} (DoRA), which reads"
            f" unsplit weights; {_REMEDY}"
        )
    own = [leaf for leaf, _ in wrapper.named_parameters(recurse=False)]
    if own or getattr(wrapper, "merged", False):
        what = f"a parameter of its own, {own[0]}" if own else "been merged into its layer"
        raise ModelError(f"parallel.tp: the adapter of {name} has {what}; unmerge it, or {_REMEDY}")
    for part, module in wrapper.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and not part.startswith(_BASE):
            raise ModelError(
                f"parallel.tp: the adapter of {name} drops with p = {module.p} ({part}), and ranks"
                " of tp that compute one A x would drop different places; use lora_dropout=0, or"
                f" {_REMEDY}"
            )


def _matrices(wrapper: nn.Module) -> list[nn.Module]:
    return [one for side in ("lora_A", "lora_B") for one in wrapper.get_submodule(side).children()]
