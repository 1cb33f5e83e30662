"""Predictions for every model type that Transformers builds small. For `make proof`.

The bytes of a cache are those at the end of Transformers' `generate`, and the planner's parameters
those of the built model.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from plait.errors import PlaitError
from plait.inference.capacity import CacheDemand, cache_bytes, cache_layout_of
from plait.planner.built import as_built
from plait.planner.models import from_config
from plait.sharded.cache import supports_cache
from tests.measured.model_types import make_small
from tests.unit.inference.cache_models import generated_cache_bytes

TABLE = Path(__file__).parents[3] / "docs" / "reference" / "model_types.json"
TYPES = sorted(
    name
    for name, entry in json.loads(TABLE.read_text(encoding="utf-8"))["types"].items()
    if "cells" in entry
)
GUESSED = {"cpmant": "its forward reads values, which meta lacks, and it caches 32 tokens more"}
"""Types whose cache is counted from the heads in the configuration, which a generation reports."""
AT_MOST = {"deepseek_v4": "it adds to its cache once in many tokens"}
"""Types whose cache may be smaller than predicted."""
pytestmark = pytest.mark.proof


@cache
def small(name):
    """Return the configuration of the small version. Tests must not change it."""
    fields = make_small(name).tested.fields
    assert fields is not None
    return dict(fields)


def model_of(fields, device="cpu"):
    """Return the model of a configuration, with random weights."""
    settings = {key: value for key, value in fields.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(fields["model_type"], **settings)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


@pytest.mark.parametrize("name", TYPES)
def test_a_cache_has_the_predicted_bytes(name):
    model = model_of(small(name))
    if not supports_cache(model):
        pytest.skip("it caches nothing")
    layout = cache_layout_of(model_of(small(name), "meta"))
    if name in GUESSED:
        pytest.skip(GUESSED[name])
    model.generation_config.eos_token_id = None
    for prompt, new in ((3, 2), (11, 5)):
        try:
            actual = generated_cache_bytes(model, prompt, new)
        except Exception as error:  # code of the model, or of the cache that it gets
            pytest.skip(f"Transformers' generate raises {type(error).__name__}: {error}")
        if actual is None:
            pytest.skip("Transformers' generate returns no cache")
        work = CacheDemand(requests=2, tokens=prompt + new - 1, itemsize=4)
        predicted = cache_bytes(layout, work)
        is_bound = name in AT_MOST and predicted > actual
        assert predicted == actual or is_bound, f"{prompt} tokens and {new} new ones"


@pytest.mark.parametrize("name", TYPES)
def test_a_plan_has_the_parameters_of_the_model(name):
    fields = small(name)
    try:
        architecture = from_config(fields)
    except PlaitError as error:
        pytest.skip(f"no plan: {error}")
    actual = sum(parameter.numel() for parameter in model_of(fields, "meta").parameters())
    assert as_built(architecture, fields).parameters == actual
