"""Blocks and parameters counted of the model that Transformers builds."""

from dataclasses import replace

import numpy as np
import pytest

from plait.errors import ConfigError
from plait.model.blocks import find_blocks
from plait.planner import built, hardware, models
from plait.planner.job import Layouts
from plait.planner.models import Model, from_config, named
from plait.planner.request import Request, job_of
from plait.planner.space import space_of
from plait.planner.states import account_states

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 500}
TOWER = {"patch_size": 16, "image_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}  # fmt: skip
ODD = {
    "git": {"pad_token_id": 0},
    "roformer": {},
    "recurrent_gemma": {},
    "hrm_text": {"head_dim": 16, "H_cycles": 1, "L_cycles": 2},
    "blenderbot-small": {"d_model": 64, "decoder_layers": 3, "encoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96},
    "gemma3": {"text_config": {"model_type": "gemma3_text", **SIZES, "head_dim": 16}, "vision_config": TOWER},
}  # fmt: skip
"""Families of which no formula knows the layers: dropout of eager attention, an image tower, recurrences, two lists of blocks that run
several times, a decoder cut out of an encoder and a decoder."""


@pytest.mark.parametrize("kind", ODD)
def test_parameters_of_families_without_a_formula_are_counted(kind):
    config = {"model_type": kind, **({} if kind == "gemma3" else SIZES), **ODD[kind]}
    model, found = built.built(config, dropout=True), from_config(config)
    assert float(found.parameters) == pytest.approx(
        sum(p.numel() for p in model.parameters()), rel=1e-12
    )
    assert found.layers == len(find_blocks(model))
    for fewer_or_more in (
        found,
        replace(found, layer_parameters=found.layer_parameters // 3),
        replace(found, end_parameters=10**7),
    ):
        states = account_states(
            job_of(Request(Model(fewer_or_more, {}), hardware.cluster("cpu", 1), 1, 8), Layouts())
        )
        assert hardware.only(states.first["weights"]) == pytest.approx(
            4 * float(fewer_or_more.parameters), rel=1e-6
        )


def test_a_family_whose_layers_are_not_known_is_told(monkeypatch):
    config = {"model_type": "recurrent_gemma", **SIZES}
    known = models.unknown_layers(from_config(config))
    assert (
        "recurrent_gemma: the planner does not know its layers; it takes their parameters from the model"
        in known
    )
    assert "3 blocks of " in known
    monkeypatch.setattr(built, "find_spec", lambda name: None)
    assert "recurrent_gemma: the planner does not know its layers" in models.unknown_layers(
        from_config(config)
    )
    # Nothing is built that would take minutes.
    assert built.as_built(replace(named("llama-3-8b"), layers=10**6), config).layer_parameters == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "bogus"}, "Transformers builds no such model (KeyError: 'bogus')"),
        ({"attention_dropout": "0.1"}, "model.config: Transformers refuses it: TypeError: Field 'attention_dropout'"),
        ({"head_dim": 33}, "RoPE requires an even rotary dimension"),
        ({"hiden_size": 3}, "model.config.hiden_size = 3: a 'llama' configuration has no such field; use 'hidden_size'"),
        ({"model_type": "lama"}, "Transformers has no such architecture; use 'llama'"),
    ],
)  # fmt: skip
def test_what_training_refuses_is_known_beforehand(changes, words):
    config = {"model_type": "llama", **SIZES}
    assert built.why_refused(config) is None
    assert words in str(built.why_refused({**config, **changes}))


def test_blocks_of_two_lists_are_planned_without_a_pipeline():
    found = from_config({"model_type": "hrm_text", **SIZES, **ODD["hrm_text"]})
    request = Request(Model(found, {}), hardware.cluster("h100", 4), 8, 16)
    space = space_of(request)
    assert set(np.unique(space.layouts.pp)) == {1}
    assert "the blocks are in 2 lists" in next(
        one.rule for one in space.excluded if one.region == "pp > 1"
    )
    with pytest.raises(ConfigError, match="pp = 2: parallel.pp > 1: the blocks are in 2 lists"):
        space_of(request, {"pp": 2})


def test_a_model_without_blocks_has_its_parameters():
    config = {"model_type": "roc_bert", **SIZES, "intermediate_size": 96}
    model, found = built.built(config, dropout=False), from_config(config)
    assert not find_blocks(model) and "no list of repeated blocks" in found.uncut
    assert float(found.parameters) == sum(parameter.numel() for parameter in model.parameters())
