"""Sizes in a Transformers configuration that may differ between layers, as those of Gemma 4 do.

Such a configuration raises an error if the size is read from it directly.
"""

from __future__ import annotations

from typing import Any


def sizes_of_layers(config: Any, name: str) -> list[int]:
    """Return a size of every layer, in model order.

    Args:
        config: A configuration of Transformers.
        name: Name of its field.

    Returns:
        One entry per layer; a single entry if the layers do not differ; an empty list if the
        configuration does not define the size for all layers.
    """
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    sizes = [getattr(layer, name, None) for layer in layers]
    return [size for size in sizes if size] if all(sizes) else []


def largest_of_layers(config: Any, name: str) -> int | None:
    """Return the largest size of any layer, or None if the configuration does not define it."""
    return max(sizes_of_layers(config, name), default=None)
