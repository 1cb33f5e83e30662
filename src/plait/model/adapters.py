"""Low-rank adapters (PEFT's LoRA) in a model that tensor parallelism splits.

An adapted layer is a wrapper that holds the layer as `base_layer` and two matrices, A [r, in] and
B [out, r]. It computes base(x) + s B A x, where s is the scaling of the adapter.

Note [Plans with adapters]
    The tensor-parallel plan is created for the model without wrappers and then extended. If a layer
    is column-split, its B is split along the same columns, and every rank computes A x. If a layer
    is row-split, its A is split along the same rows, and the products of width r are summed over
    the ranks.

    Under sequence parallelism, the products A x of a row-split layer are scattered in the same way
    as its outputs. The products A x of a column-split layer are gathered unless the input of the
    layer has been gathered. The matrix that is not split sees different tokens, or gradients of
    different columns, on every rank. Its gradient is therefore summed over the ranks.

Attributes are recognised by PEFT's names, so that PEFT need not be installed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from plait._torch.modules import direct_parameters
from plait.errors import ModelError

LEARNED_KEYS = ("PREFIX_TUNING", "CARTRIDGE")
"""Types of adapters that learn keys and values. Other prompts are embeddings."""

_BASE = "base_layer"
_REMEDY = "use parallel.tp = 1, with ZeRO or a pipeline"


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the wrapper of every adapted layer, keyed by the layer's name."""
    adapted: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, _BASE, None), nn.Module):
            adapted[name] = module
    return adapted


def adapted_parameters(model: nn.Module) -> dict[str, Any]:
    """Return the wrapper of every adapted parameter (`target_parameters`), by parameter name.

    The wrappers of several parameters of one module are nested.
    """
    adapted: dict[str, Any] = {}
    for name, wrapper in adapted_layers(model).items():
        if hasattr(wrapper, "parameter_name") and hasattr(wrapper, "get_delta_factors"):
            adapted[name] = wrapper
    return adapted


def refuse_adapted_parameters(model: nn.Module) -> None:
    """Raise ModelError for adapted parameters, which tensor parallelism does not split."""
    for name, wrapper in adapted_parameters(model).items():
        raise ModelError(
            f"parallel.tp: {name} has an adapter on its parameter {wrapper.parameter_name}"
            " (target_parameters), but only LoRA on linear layers is split; use parallel.tp = 1"
            " (ZeRO, a pipeline and parallel.ep are supported)"
        )


def adapter_type(config: Any) -> str:
    """Return the adapter type in a PEFT configuration as a string, such as `LORA`."""
    kind = getattr(config, "peft_type", None)
    return str(getattr(kind, "value", kind))


def refuse_prompts(model: nn.Module, axis: str, kinds: Collection[str] | None = None) -> None:
    """Raise ModelError for an adapter of PEFT that puts learned tokens before the sequence.

    Args:
        model: The model.
        axis: Configuration field of the parallel degree that does not support such adapters, for
            the message.
        kinds: Types of adapters that are refused. None refuses all that learn prompts.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if not getattr(config, "is_prompt_learning", False):
            continue
        kind = adapter_type(config)
        if kinds is None:
            reason = "every rank would put them before its own part of the sequence"
        elif kind in kinds:
            reason = "their keys and values are of all heads, and each rank has some"
        else:
            continue
        raise ModelError(
            f"{axis}: the adapter {name} is of type {kind}, whose learned tokens precede the"
            f" sequence, and {reason}; use {axis} = 1 (ZeRO and a pipeline are supported)"
        )


def refuse_rank_allocation(model: nn.Module) -> None:
    """Raise ModelError for AdaLoRA, whose loss reads all adapters after the forward."""
    for name, config in getattr(model, "peft_config", {}).items():
        if adapter_type(config) == "ADALORA":
            raise ModelError(
                f"zero_optimization.stage = 3: the adapter {name} is of type ADALORA, which adds a"
                " penalty on all of its weights to the loss, and these are shards after the"
                " forward; use ZeRO stage 2, or LoraConfig"
            )


def copied_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the wrappers of fully trained layers (PEFT's `modules_to_save`)."""
    copied: list[str] = []
    for name, module in model.named_modules():
        if hasattr(module, "original_module") and isinstance(
            getattr(module, "modules_to_save", None), nn.ModuleDict
        ):
            copied.append(name)
    return tuple(copied)


def adapter_names(model: Any) -> tuple[str, ...]:
    """Return the names of the adapters that PEFT has added to a model, or an empty tuple."""
    return tuple(getattr(model, "peft_config", ()))


def without_wrapper(model: nn.Module) -> nn.Module:
    """Return the model inside the wrapper of PEFT's `get_peft_model`, or the model if it has none.

    A Transformers model with adapters of its own (`add_adapter`) has a `peft_config` too, but no
    wrapper.
    """
    get_base_model: Any = None
    if hasattr(model, "peft_config"):
        get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


@contextmanager
def without_adapters(model: nn.Module, wrappers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace the wrappers in a model with the layers that they wrap, inside the context.

    Args:
        model: The model, which is changed in place and restored at the end.
        wrappers: The result of `adapted_layers`.
    """
    for name, wrapper in wrappers.items():
        _replace_module(model, name, wrapper.get_submodule(_BASE))
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            _replace_module(model, name, wrapper)


@contextmanager
def with_full_prompts(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give the prompt encoders of a model their full weights, inside the context.

    When PEFT saves prompts, it computes them from the modules, not from a state dict.

    Args:
        model: A model of PEFT. Other models are not changed.
        weights: Full weights by name.
    """
    encoders = getattr(model, "prompt_encoder", None)
    modules = encoders.named_modules(prefix="prompt_encoder") if encoders is not None else ()
    replaced: list[tuple[dict[str, nn.Parameter | None], dict[str, nn.Parameter | None]]] = []
    for name, module in modules:
        parameters = direct_parameters(module)
        replaced.append((parameters, dict(parameters)))
        for leaf in parameters:
            full = weights.get(f"{name}.{leaf}")
            if full is not None:
                parameters[leaf] = nn.Parameter(full, requires_grad=False)
    try:
        yield
    finally:
        for parameters, sharded in replaced:
            parameters.update(sharded)


@contextmanager
def with_adapters_enabled(model: nn.Module) -> Iterator[None]:
    """Enable the adapters that PEFT's `disable_adapter` has disabled, inside the context.

    The gradients of their parameters are enabled as well. Modules may be replaced inside the
    context. At its end, the adapters are disabled again.
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
        # A pipeline stage removes the blocks of other stages inside the context.
        if name in modules:
            cast("Any", modules[name]).enable_adapters(enabled)


def _replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def base_name(name: str, wrappers: Mapping[str, nn.Module]) -> str:
    """Translate a name in the model without adapters to the name in the model with adapters.

    Args:
        name: Full name of a module or parameter in the model without adapters.
        wrappers: The result of `adapted_layers`.
    """
    for layer in wrappers:
        if name == layer or name.startswith(f"{layer}."):
            return f"{layer}.{_BASE}{name[len(layer) :]}"
    return name


def split_adapters(name: str, wrapper: nn.Module, style: str | None) -> dict[str, str]:
    """Return the styles of the adapter modules that are split together with their layer.

    See Note [Plans with adapters].

    Args:
        name: Full name of the adapted layer.
        wrapper: The layer's wrapper.
        style: Style of the layer, or None if the layer is replicated.

    Returns:
        Style by full name of the module; empty if the layer is replicated.

    Raises:
        ModelError: The adapter would compute wrong values under tensor parallelism.
    """
    _check_adapter(name, wrapper)
    if style is None:
        return {}
    if style == "vocab_head":
        raise ModelError(
            f"parallel.tp: {name} has an adapter, and its output is split over the vocabulary for"
            " the loss, while the adapter's output is not; leave the layer out of the adapter's"
            f" target modules, train the layer in full (modules_to_save), or {_REMEDY}"
        )
    if style not in ("colwise", "rowwise"):
        raise ModelError(
            f"parallel.tp: {name} has an adapter and the style {style!r}, with which adapters are"
            f" not supported; leave the layer out of the adapter's target modules, or {_REMEDY}"
        )

    # The matrix that has the split dimension: B [out, r] for columns, A [r, in] for rows.
    side = "lora_B" if style == "colwise" else "lora_A"
    return dict.fromkeys(adapter_matrices(name, wrapper, sides=(side,)), style)


def adapter_matrices(
    name: str, wrapper: nn.Module, *, sides: Iterable[str] = ("lora_A", "lora_B")
) -> set[str]:
    """Return the full names of the modules that hold the matrices of an adapted linear layer."""
    return {
        f"{name}.{side}.{adapter}"
        for side in sides
        for adapter, _ in wrapper.get_submodule(side).named_children()
    }


def _check_adapter(name: str, wrapper: nn.Module) -> None:
    """Raise ModelError unless the adapter is unmerged LoRA on a linear layer, without dropout."""
    kind = type(wrapper).__name__
    children = set()
    for leaf, child in wrapper.named_children():
        if next(child.parameters(), None) is not None:
            children.add(leaf)

    if not {"lora_A", "lora_B"} <= children or any(
        type(matrix) is not nn.Linear for matrix in _matrices(wrapper)
    ):
        raise ModelError(
            f"parallel.tp: {name} is {kind}, an adapter around a layer, but only LoRA on linear"
            f" layers is split; {_REMEDY}"
        )
    if others := sorted(children - {_BASE, "lora_A", "lora_B"}):
        raise ModelError(
            f"parallel.tp: the adapter of {name} has {', '.join(others)} (DoRA), which reads"
            f" unsplit weights; {_REMEDY}"
        )

    parameters = [leaf for leaf, _ in wrapper.named_parameters(recurse=False)]
    if parameters:
        raise ModelError(
            f"parallel.tp: the adapter of {name} has a parameter of its own, {parameters[0]};"
            f" unmerge it, or {_REMEDY}"
        )
    if getattr(wrapper, "merged", False):
        raise ModelError(
            f"parallel.tp: the adapter of {name} has been merged into its layer; unmerge it, or"
            f" {_REMEDY}"
        )

    # The wrapped layer may have dropout: the plan decides on it as without the adapter.
    for leaf, module in wrapper.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and not leaf.startswith(_BASE):
            raise ModelError(
                f"parallel.tp: the adapter of {name} has dropout with p = {module.p} ({leaf}). The"
                " ranks of tp compute the same A x and would drop different elements; use"
                f" lora_dropout=0, or {_REMEDY}"
            )


def _matrices(wrapper: nn.Module) -> Iterator[nn.Module]:
    for side in ("lora_A", "lora_B"):
        yield from wrapper.get_submodule(side).children()
