"""Model as a plain list of layers, with the interface of DeepSpeed's `PipelineModule`.

Scripts for DeepSpeed need only a different import. Each layer takes the output of the previous one.
Every layer is a block, so a stage can begin with any layer. Layers are built on the device that the
script chooses. Under `torch.device("meta")` they need no memory; their parameters are initialised
later by name, with the same values for every layout. `TiedLayerSpec`s with the same key share the
attributes that they name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from plait.errors import ModelError


class LayerSpec:
    """Layer that is built later, e.g. `LayerSpec(nn.Linear, 8, 8)`."""

    def __init__(self, typename: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        self.typename = typename
        self.args = args
        self.kwargs = kwargs

    def build(self) -> nn.Module:
        """Return a new layer."""
        return self.typename(*self.args, **self.kwargs)


class TiedLayerSpec(LayerSpec):
    """Layer that shares parameters with all layers of the same key.

    Args:
        key: Key of the layers that share parameters.
        typename: Class of the layer, called with `args` and `kwargs`.
        forward_fn: Function that replaces the layer's forward, called as
            `forward_fn(layer, input)`.
        tied_weight_attr: Name or names of the shared attributes.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key = key
        self.forward_fn = forward_fn
        if isinstance(tied_weight_attr, str):
            tied_weight_attr = (tied_weight_attr,)
        self.tied = tuple(tied_weight_attr)


class _FunctionLayer(nn.Module):
    """Layer without parameters that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class PipelineModel(nn.Module):
    """Chain of layers that can be split into pipeline stages.

    The configuration defines the number of stages and their first layers.

    Args:
        layers: `LayerSpec`s, modules, or functions of one argument.

    Raises:
        ModelError: A layer is none of these, or tied parameters have different shapes.
    """

    def __init__(self, layers: Sequence[LayerSpec | nn.Module | Callable[[Any], Any]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_build_layers(layers))

    @property
    def pipeline_blocks(self) -> tuple[str, ...]:
        """Names of all layers. Every layer is a block, whatever its class."""
        return tuple(f"layers.{index}" for index in range(len(self.layers)))

    def forward(self, value: Any) -> Any:
        """Apply all layers in order."""
        for layer in self.layers:
            value = layer(value)
        return value


def _build_layers(
    layers: Sequence[LayerSpec | nn.Module | Callable[[Any], Any]],
) -> Iterator[nn.Module]:
    first_of_key: dict[str, nn.Module] = {}
    for spec in layers:
        if isinstance(spec, LayerSpec):
            layer = spec.build()
            if isinstance(spec, TiedLayerSpec):
                _tie(first_of_key.setdefault(spec.key, layer), layer, spec)
                if spec.forward_fn is not None:
                    # The layer itself stays in the list, so its parameters keep their names.
                    layer.forward = _bind(spec.forward_fn, layer)
            yield layer
        elif isinstance(spec, nn.Module):
            yield spec
        elif callable(spec):
            yield _FunctionLayer(spec)
        else:
            raise ModelError(
                f"a layer is of type {type(spec).__name__}, but must be a LayerSpec, a module or a"
                " function of one argument"
            )


def _tie(first: nn.Module, layer: nn.Module, spec: TiedLayerSpec) -> None:
    """Assign the shared attributes of the first layer of a key to another layer."""
    for name in spec.tied:
        shared = getattr(first, name, None)
        replaced = getattr(layer, name, None)
        if shared is None or replaced is None or shared.shape != replaced.shape:
            raise ModelError(
                f"TiedLayerSpec {spec.key!r}: {name} has the shapes {_shape(shared)} and"
                f" {_shape(replaced)}; tied parameters need the same shape"
            )
        setattr(layer, name, shared)


def _shape(tensor: Any) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _bind(function: Callable[[nn.Module, Any], Any], layer: nn.Module) -> Callable[[Any], Any]:
    return lambda value: function(layer, value)
