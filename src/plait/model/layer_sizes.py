"""Sizes that a configuration of Transformers has for each of its layers, as those of Gemma 4 do: it
raises where they are read as one.
"""

from __future__ import annotations

from typing import Any


def sizes_of_layers(config: Any, name: str) -> list[int]:
    """A size of every layer, in their order; one entry for all where they do not differ, none where
    the configuration does not say.
    """
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    found = [getattr(layer, name, None) for layer in layers]
    return [size for size in found if size] if all(found) else []


def largest_of_layers(config: Any, name: str) -> int | None:
    """The largest of them, None where the configuration does not say."""
    return max(sizes_of_layers(config, name), default=None)
