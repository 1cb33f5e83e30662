"""Finding the repeated blocks."""

import pytest
import torch
from torch import nn

from plait.errors import ModelError
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.layers import tied_names


def layer(width=8):
    """A block with a list of its own inside."""
    return nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(width, width) for _ in range(3))})


def model():
    """An encoder, a decoder, a small stem and a tied head."""
    made = nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            "embed": nn.Embedding(20, 8),
            "encoder": nn.ModuleList(layer() for _ in range(2)),
            "decoder": nn.ModuleList(layer() for _ in range(3)),
            "head": nn.Linear(8, 20, bias=False),
        }
    )
    made["head"].weight = made["embed"].weight
    return made


def test_outermost_lists_of_one_class():
    """Both stacks, not the experts inside them, not the stem."""
    assert find_blocks(model()) == ("encoder.0", "encoder.1", "decoder.0", "decoder.1", "decoder.2")
    assert find_blocks(nn.Linear(2, 2)) == ()


@pytest.mark.parametrize(
    ("kind", "blocks", "own"),
    [
        ("gemma3", "model.language_model.layers", {"text_config": "gemma3_text", "vision_config": "siglip_vision_model"}),
        ("got_ocr2", "model.language_model.layers", {"text_config": "qwen2", "vision_config": "got_ocr2_vision"}),
        ("git", "git.encoder.layer", {"vision_config": "git_vision_model"}),
    ],
)  # fmt: skip
def test_the_blocks_are_those_of_the_language_model(kind, blocks, own):
    """A tower's list was taken for blocks too, or (a large tower, a small model) alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    text |= {"num_key_value_heads": 2, "head_dim": 8}
    vision = {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "mlp_dim": 1024,
    }
    parts = {
        name: {"model_type": type_, **(text if name == "text_config" else vision)}
        for name, type_ in own.items()
    }
    config = AutoConfig.for_model(kind, **({} if "text_config" in own else text), **parts)
    with torch.device("meta"):
        found = find_blocks(AutoModelForCausalLM.from_config(config))
    assert found == tuple(f"{blocks}.{index}" for index in range(3))


def test_patterns():
    """Every pattern must match; of nested matches the outermost counts."""
    assert find_blocks(model(), ["decoder.*"]) == ("decoder.0", "decoder.1", "decoder.2")
    words = r"parallel\.blocks = 'layers\.\*': no module has such a name; modules of that depth are .*encoder\.0"
    with pytest.raises(ModelError, match=words):
        find_blocks(model(), ["layers.*"])


def test_facts():
    """Tied parameters once, owners, counts; nothing needs data."""
    with torch.device("meta"):
        made = model()
    facts = model_facts(made, find_blocks(made))
    embed = next(p for p in facts.parameters if p.name == "embed.weight")
    assert embed.also == ("head.weight",) and embed.unit == -1 and embed.numel == 160
    assert facts.numel == sum(p.numel() for p in made.parameters())
    assert {p.unit for p in facts.parameters} == {-1, 0, 1, 2, 3, 4}
    assert tied_names(made) == (("embed.weight", "head.weight"),)


def test_a_parameter_is_in_the_block_of_its_whole_name():
    """The tenth block's name begins with the first's."""
    many = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2) for _ in range(12))})
    blocks = find_blocks(many)
    assert len(blocks) == 12
    assert {p.name: p.unit for p in model_facts(many, blocks).parameters} == {
        f"{name}.{part}": index for index, name in enumerate(blocks) for part in ("weight", "bias")
    }
