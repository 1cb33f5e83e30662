"""Every model type that Transformers builds small: the bytes of its cache are those that its own `generate` holds at the end, and the
planner's parameters those of the built model. For `make proof`."""

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
from tests.unit.inference.kept_models import tensors

TYPES = {
    name: found
    for name, found in json.loads(
        (Path(__file__).parents[3] / "docs" / "reference" / "model_types.json").read_text(
            encoding="utf-8"
        )
    )["types"].items()
    if "cells" in found
}
BY_HEADS = {
    "cpmant": "its forward looks at values, which meta has not; it keeps 32 tokens of its own besides"
}
"""Counted of what the configuration says of heads, which a generation says."""
AT_MOST = {"deepseek_v4": "it adds to what it keeps once in many tokens"}
"""No more than what is counted is held."""
pytestmark = pytest.mark.proof


@cache
def small(name):
    fields = make_small(name).tested.fields
    assert fields is not None
    return dict(fields)  # which no test changes


def model_of(fields, device="cpu"):
    """Of a configuration, with weights that are drawn."""
    kind = fields["model_type"]
    config = transformers.AutoConfig.for_model(
        kind, **{key: value for key, value in fields.items() if key != "model_type"}
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_cache_has_the_bytes_that_are_counted(name):
    fields = small(name)
    model = model_of(fields)
    if not supports_cache(model):
        pytest.skip("it keeps nothing of earlier tokens")
    keeps = cache_layout_of(model_of(fields, "meta"))
    if name in BY_HEADS:
        pytest.skip(BY_HEADS[name])
    model.generation_config.eos_token_id = None
    for prompt, new in ((3, 2), (11, 5)):
        held = held_by(model, prompt, new)
        counted = cache_bytes(keeps, CacheDemand(requests=2, tokens=prompt + new - 1, itemsize=4))
        assert counted == held or (name in AT_MOST and counted > held), (
            f"{prompt} tokens and {new}: {counted} counted, {held} held"
        )


def held_by(model, prompt, new):
    """Bytes of the cache at the end of Transformers' own `generate`, of two requests. Skips where that cannot generate with a cache."""
    ids = torch.arange(3, 3 + prompt).expand(2, -1)
    try:
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
    except Exception as error:  # of the model's code or of the cache that it is given
        pytest.skip(f"Transformers' generate raises {type(error).__name__}: {error}")
    if made.past_key_values is None:
        pytest.skip("Transformers' generate gives no cache back")
    return sum(one.nbytes for one in tensors(made.past_key_values))


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_plan_has_the_models_parameters(name):
    fields = small(name)
    try:
        described = from_config(fields)
    except PlaitError as error:
        pytest.skip(f"no plan: {error}")
    planned = as_built(described, fields)
    assert planned.parameters == sum(
        parameter.numel() for parameter in model_of(fields, "meta").parameters()
    )
