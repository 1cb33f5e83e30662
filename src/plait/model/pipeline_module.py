"""A plain model as a list of layers, in the shape of DeepSpeed's `PipelineModule`, so that such
code moves over by its import.

Each layer takes what the one before it returned; every layer is a block, so stages are cut
anywhere. Layers are built where the code says (under `torch.device("meta")` without memory, then
initialised by name, the same on every layout). A key ties the named attributes of all layers that
carry it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from plait.errors import ModelError


class LayerSpec:
    """A layer that is built later: `LayerSpec(nn.Linear, 8, 8)`."""

    def __init__(self, typename: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> None:
        self.typename = typename
        self.args = args
        self.kwargs = kwargs

    def build(self) -> nn.Module:
        """The layer."""
        return self.typename(*self.args, **self.kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares `tied_weight_attr` with all layers of the same `key`. `forward_fn(layer,
    input)` replaces its forward.
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
        self.tied = (
            (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)
        )


class _Called(nn.Module):
    """A function as a layer, or another forward of a layer; the layer's parameters keep their
    names.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class PipelineModule(nn.Module):
    """`layers`: LayerSpecs, modules or functions of one argument. The configuration defines how
    they are cut, and into how many stages.
    """

    def __init__(self, layers: Sequence[LayerSpec | nn.Module | Callable[[Any], Any]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self._built(layers))

    @property
    def pipeline_blocks(self) -> tuple[str, ...]:
        """Every layer is a block, whatever its class."""
        return tuple(f"layers.{index}" for index in range(len(self.layers)))

    def forward(self, value: Any) -> Any:
        """Through all layers."""
        for layer in self.layers:
            value = layer(value)
        return value

    @staticmethod
    def _built(
        layers: Sequence[LayerSpec | nn.Module | Callable[[Any], Any]],
    ) -> Iterator[nn.Module]:
        first: dict[str, nn.Module] = {}
        for spec in layers:
            if not isinstance(spec, LayerSpec):
                if not callable(spec):
                    raise ModelError(
                        "a layer is a LayerSpec, a module or a function of one argument, not"
                        f" {type(spec).__name__}"
                    )
                yield spec if isinstance(spec, nn.Module) else _Called(spec)
                continue
            layer = spec.build()
            if isinstance(spec, TiedLayerSpec):
                _tie(first.setdefault(spec.key, layer), layer, spec)
                if spec.forward_fn is not None:
                    layer.forward = _bound(spec.forward_fn, layer)
            yield layer


def _tie(first: nn.Module, layer: nn.Module, spec: TiedLayerSpec) -> None:
    for name in spec.tied:
        ours = getattr(first, name, None)
        theirs = getattr(layer, name, None)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (ours, theirs)]
            raise ModelError(
                f"TiedLayerSpec {spec.key!r}: {name} has the shapes {shapes[0]} and {shapes[1]};"
                " tied ones are equal"
            )
        setattr(layer, name, ours)


def _bound(function: Callable[[nn.Module, Any], Any], layer: nn.Module) -> Callable[[Any], Any]:
    return lambda value: function(layer, value)
