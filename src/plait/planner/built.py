"""Model of a configuration as Transformers builds it, on the meta device.

Its parameters are counted for families that the planner has no formulas for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError, PlaitError, first_line
from plait.model.blocks import find_blocks
from plait.model.described import described_config
from plait.model.stages import block_list
from plait.planner.architecture import Architecture

COUNTED_BY_FORMULA = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "deepseek_v2", "deepseek_v3")
"""Families that the formulas cover exactly; tests compare.

DeepSeek's values are narrower than its keys. CPU cores, where blocks would be counted, have no
kernel for this; GPUs have one.
"""


@dataclass(frozen=True)
class Sizes:
    """Numbers of blocks and parameters of a causal language model. Tied parameters count once."""

    blocks: int
    in_blocks: int
    """Parameters of all blocks."""
    outside: int
    uncut: str
    """Reason why the blocks cannot be split into pipeline stages; empty if they can."""


def built(config: Mapping[str, Any], *, dropout: bool) -> nn.Module:
    """Build the model of a configuration on the meta device.

    Args:
        config: Hugging Face configuration.
        dropout: Whether the model has the dropout of the configuration. False disables it.

    Raises:
        Exception: Any error of Transformers for a configuration that it does not build.
    """
    from transformers import AutoModelForCausalLM

    hf_config = _configuration(config)
    for part in _parts(hf_config):
        part.use_cache = False
        for name in _dropouts(part):
            # LayerDrop decides by a random value which layers run; a dry run has no values.
            if not dropout or "layer" in name:
                setattr(part, name, 0.0)

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, trust_remote_code=False
        )
    return model


def drops(config: Mapping[str, Any]) -> bool:
    """Return True if the model of a configuration has dropout in training."""
    return any(
        value > 0 for part in _parts(_configuration(config)) for value in _dropouts(part).values()
    )


def _configuration(config: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))


def _dropouts(part: Any) -> dict[str, float]:
    return {
        name: value
        for name, value in vars(part).items()
        if "drop" in name and isinstance(value, float)
    }


def _parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and those nested in it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_diff_dict"):
            yield from _parts(value)


def sizes_of(config: Mapping[str, Any]) -> Sizes | None:
    """Return the sizes of a model, or None if Transformers is missing or cannot build it."""
    if find_spec("transformers") is None:
        return None
    return _sizes(json.dumps(config, sort_keys=True, default=str))


_MOST_BLOCKS = 2000
"""Largest number of blocks to build. Each takes Transformers a millisecond or more."""


@lru_cache(maxsize=64)
def _sizes(config: str) -> Sizes | None:
    try:
        model = built(json.loads(config), dropout=False)
    except Exception:  # `plait train` reports the error when it builds the model
        return None
    blocks = find_blocks(model)
    inside = {
        id(parameter): parameter.numel()
        for name in blocks
        for parameter in model.get_submodule(name).parameters()
    }
    outside = sum(
        parameter.numel() for parameter in model.parameters() if id(parameter) not in inside
    )

    try:
        block_list(model, blocks)
    except ModelError as error:
        return Sizes(len(blocks), sum(inside.values()), outside, str(error))
    return Sizes(len(blocks), sum(inside.values()), outside, "")


def as_built(model: Architecture, config: Mapping[str, Any]) -> Architecture:
    """Return an architecture with the blocks and parameters that Transformers builds.

    Families that formulas cover, and configurations that Transformers cannot build, are returned
    unchanged.
    """
    if config.get("model_type") in COUNTED_BY_FORMULA:
        return model
    sizes = sizes_of(config) if model.layers <= _MOST_BLOCKS else None
    if sizes is None:
        return model

    # Without repeated blocks, the layers are those of the description, and all other parameters are
    # outside of them.
    if not sizes.blocks:
        ends = max(sizes.outside - int(model.block_parameters), 1)
        return replace(model, end_parameters=ends, uncut=sizes.uncut)
    layers = {"layers": sizes.blocks, "dense_layers": min(int(model.dense_layers), sizes.blocks)}
    fields = {"layer_parameters": sizes.in_blocks / sizes.blocks, "end_parameters": sizes.outside}
    return replace(model, **layers, **fields, uncut=sizes.uncut)


def why_refused(config: Mapping[str, Any]) -> str | None:
    """Return the reason why `plait train` cannot build the model of a configuration.

    None if it can, and without Transformers.
    """
    if find_spec("transformers") is None:
        return None

    try:
        described_config(config, follow={})
        built(config, dropout=True)
    except PlaitError as error:
        return "; and ".join(str(error).splitlines())
    except Exception as error:  # each model validates in its own way
        return f"Transformers builds no such model ({type(error).__name__}: {first_line(error)})"

    return None
