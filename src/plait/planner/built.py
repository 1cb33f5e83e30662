"""The model of a configuration as Transformers builds it, without memory: what is counted of
families that no formula knows.
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
"""Families that formulas know; tests compare. DeepSeek's values are narrower than its keys, for
which CPU cores, where a count is made, have no kernel, and GPUs do.
"""


@dataclass(frozen=True)
class Sizes:
    """Of a causal language model; tied parameters once."""

    blocks: int
    in_blocks: int
    """Parameters of all of them."""
    outside: int
    uncut: str
    """Why no pipeline cuts its blocks; empty where one does."""


def built(config: Mapping[str, Any], *, dropout: bool) -> nn.Module:
    """On meta; without `dropout` it drops nowhere. Raises whatever Transformers raises for a
    configuration that it does not build.
    """
    from transformers import AutoModelForCausalLM

    found = _configuration(config)
    for part in _parts(found):
        part.use_cache = False
        for name in _dropouts(part):
            if not dropout or "layer" in name:  # which layers run is a value
                setattr(part, name, 0.0)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            found, dtype=torch.float32, trust_remote_code=False
        )
    return model


def drops(config: Mapping[str, Any]) -> bool:
    """Whether Transformers' model of a configuration drops anywhere in training."""
    return any(
        value > 0 for part in _parts(_configuration(config)) for value in _dropouts(part).values()
    )


def _configuration(config: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))


def _dropouts(part: Any) -> dict[str, float]:
    """Rates by their names."""
    return {
        name: value
        for name, value in vars(part).items()
        if "drop" in name and isinstance(value, float)
    }


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_diff_dict"):
            yield from _parts(value)


def sizes_of(config: Mapping[str, Any]) -> Sizes | None:
    """Of the model of a configuration; None without Transformers, and where it builds none."""
    if find_spec("transformers") is None:
        return None
    return _sizes(json.dumps(config, sort_keys=True, default=str))


_MOST_BLOCKS = 2000
"""Of more, a model is not built: each takes Transformers a millisecond or more."""


@lru_cache(maxsize=64)
def _sizes(config: str) -> Sizes | None:
    try:
        model = built(json.loads(config), dropout=False)
    except Exception:  # what Transformers refuses it tells where the model is built
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
    """`model`, described by a configuration, with the blocks and parameters that Transformers
    builds from it; as it is for families that formulas know, alone and not beside a tower, and
    where Transformers builds none.
    """
    if config.get("model_type") in COUNTED_BY_FORMULA:
        return model
    found = sizes_of(config) if model.layers <= _MOST_BLOCKS else None
    if found is None:
        return model
    # none are found that are alike: those of the description, and what is left of the parameters
    # outside
    if not found.blocks:
        ends = max(found.outside - int(model.block_parameters), 1)
        return replace(model, end_parameters=ends, uncut=found.uncut)
    layers = {"layers": found.blocks, "dense_layers": min(int(model.dense_layers), found.blocks)}
    sizes = {"layer_parameters": found.in_blocks / found.blocks, "end_parameters": found.outside}
    return replace(model, **layers, **sizes, uncut=found.uncut)


def why_refused(config: Mapping[str, Any]) -> str | None:
    """What keeps `plait train` from building the model of a configuration; None where nothing does,
    and without Transformers.
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
