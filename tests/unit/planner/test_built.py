"""Families without a formula are counted on the model that Transformers builds."""

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
FAMILIES = {
    # Dropout of eager attention.
    "git": {**SIZES, "pad_token_id": 0},
    "roformer": SIZES,
    # A recurrence.
    "recurrent_gemma": SIZES,
    # Two lists of blocks that run several times.
    "hrm_text": {**SIZES, "head_dim": 16, "H_cycles": 1, "L_cycles": 2},
    # A decoder of an encoder-decoder model.
    "blenderbot-small": {
        **SIZES,
        "d_model": 64,
        "decoder_layers": 3,
        "encoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
    },
    # An image tower.
    "gemma3": {
        "text_config": {"model_type": "gemma3_text", **SIZES, "head_dim": 16},
        "vision_config": {
            "patch_size": 16,
            "image_size": 32,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
        },
    },
}


def weight_bytes(architecture):
    """Return the bytes of the weights that one CPU process holds."""
    request = Request(Model(architecture, {}), hardware.cluster("cpu", 1), 1, 8)
    return hardware.only(account_states(job_of(request, Layouts())).first["weights"])


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_of_families_without_a_formula_are_counted(kind):
    config = {"model_type": kind, **FAMILIES[kind]}
    model = built.built(config, dropout=True)
    architecture = from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert float(architecture.parameters) == pytest.approx(count, rel=1e-12)
    assert architecture.layers == len(find_blocks(model))
    # The states follow the counts, also of a model with other proportions.
    for changed in (
        architecture,
        replace(architecture, layer_parameters=architecture.layer_parameters // 3),
        replace(architecture, end_parameters=10**7),
    ):
        expected = 4 * float(changed.parameters)
        assert weight_bytes(changed) == pytest.approx(expected, rel=1e-6)


def test_a_note_names_a_family_without_a_formula(monkeypatch):
    config = {"model_type": "recurrent_gemma", **SIZES}
    note = models.unknown_layers(from_config(config))
    unknown = "recurrent_gemma: the planner does not know its layers"
    assert f"{unknown}; it takes their parameters from the model" in note
    assert "3 blocks of " in note
    # Transformers is not installed.
    monkeypatch.setattr(built, "find_spec", lambda name: None)
    assert unknown in models.unknown_layers(from_config(config))
    # A model that takes minutes to build is not built.
    assert built.as_built(replace(named("llama-3-8b"), layers=10**6), config).layer_parameters == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "bogus"}, "Transformers builds no such model (KeyError: 'bogus')"),
        (
            {"attention_dropout": "0.1"},
            "model.config: Transformers refuses it: TypeError: Field 'attention_dropout'",
        ),
        ({"head_dim": 33}, "RoPE requires an even rotary dimension"),
        (
            {"hiden_size": 3},
            "model.config.hiden_size = 3: a 'llama' configuration has no such field; "
            "use 'hidden_size'",
        ),
        ({"model_type": "lama"}, "Transformers has no such architecture; use 'llama'"),
    ],
)
def test_configurations_that_training_refuses(changes, message):
    config = {"model_type": "llama", **SIZES}
    assert built.why_refused(config) is None
    assert message in str(built.why_refused({**config, **changes}))


def test_two_lists_of_blocks_are_planned_without_a_pipeline():
    architecture = from_config({"model_type": "hrm_text", **FAMILIES["hrm_text"]})
    request = Request(Model(architecture, {}), hardware.cluster("h100", 4), 8, 16)
    space = space_of(request)
    assert set(np.unique(space.layouts.pp)) == {1}
    rules = {excluded.region: excluded.rule for excluded in space.excluded}
    assert "the blocks are in 2 lists" in rules["pp > 1"]
    with pytest.raises(ConfigError, match="pp = 2: parallel.pp > 1: the blocks are in 2 lists"):
        space_of(request, {"pp": 2})


def test_parameters_of_a_model_without_blocks_are_counted():
    config = {"model_type": "roc_bert", **SIZES, "intermediate_size": 96}
    model = built.built(config, dropout=False)
    architecture = from_config(config)
    assert not find_blocks(model) and "no list of repeated blocks" in architecture.uncut
    count = sum(parameter.numel() for parameter in model.parameters())
    assert float(architecture.parameters) == count
