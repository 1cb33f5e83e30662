"""The repeated blocks of a model are found, and its facts are counted per block."""

import pytest
import torch
from torch import nn

from plait.errors import ModelError
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.layers import tied_names
from tests.unit.model.families import SMALL


def encoder_decoder():
    """Return a model with two stacks, lists inside their blocks, a small stem and a tied head."""

    def layer():
        return nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))})

    model = nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            "embed": nn.Embedding(20, 8),
            "encoder": nn.ModuleList([layer(), layer()]),
            "decoder": nn.ModuleList([layer(), layer(), layer()]),
            "head": nn.Linear(8, 20, bias=False),
        }
    )
    model["head"].weight = model["embed"].weight
    return model


STACKS = ("encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2")


def test_outermost_lists_of_one_class_are_blocks():
    assert find_blocks(encoder_decoder()) == STACKS
    assert find_blocks(nn.Linear(2, 2)) == ()


TEXT = {**SMALL, "num_hidden_layers": 3}
LARGE_TOWER = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "mlp_dim": 1024,
}


@pytest.mark.parametrize(
    ("kind", "stack", "text_type", "vision_type"),
    [
        ("gemma3", "model.language_model.layers", "gemma3_text", "siglip_vision_model"),
        ("got_ocr2", "model.language_model.layers", "qwen2", "got_ocr2_vision"),
        ("git", "git.encoder.layer", None, "git_vision_model"),
    ],
)
def test_blocks_are_those_of_the_language_model(kind, stack, text_type, vision_type):
    """The list of a vision tower is not one of blocks, even if it is larger."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"vision_config": {"model_type": vision_type, **LARGE_TOWER}}
    if text_type is None:
        fields |= TEXT
    else:
        fields["text_config"] = {"model_type": text_type, **TEXT}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    assert find_blocks(model) == tuple(f"{stack}.{index}" for index in range(3))


def test_patterns_must_match():
    assert find_blocks(encoder_decoder(), ["decoder.*"]) == STACKS[2:]
    message = r"parallel\.blocks = 'layers\.\*': no module has such a name; .* are .*encoder\.0"
    with pytest.raises(ModelError, match=message):
        find_blocks(encoder_decoder(), ["layers.*"])


def test_facts_count_tied_parameters_once():
    with torch.device("meta"):
        model = encoder_decoder()
    facts = model_facts(model, find_blocks(model))
    embed = next(p for p in facts.parameters if p.name == "embed.weight")
    assert embed.also == ("head.weight",) and embed.unit == -1 and embed.numel == 160
    assert facts.numel == sum(p.numel() for p in model.parameters())
    assert {p.unit for p in facts.parameters} == {-1, 0, 1, 2, 3, 4}
    assert tied_names(model) == (("embed.weight", "head.weight"),)


def test_a_parameter_is_in_the_block_of_its_full_name():
    """The name of the eleventh block begins with that of the second."""
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(12))})
    facts = model_facts(model, find_blocks(model))
    assert len(facts.parameters) == 24
    for parameter in facts.parameters:
        assert parameter.unit == int(parameter.name.split(".")[1])
