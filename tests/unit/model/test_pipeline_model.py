"""DeepSpeed's shape of a model: what layers of one key share."""

import pytest
from torch import nn

import plait
from plait.errors import ModelError


def test_all_named_attributes_are_tied():
    specs = [
        plait.TiedLayerSpec("twice", nn.Linear, 4, 4, tied_weight_attr=("weight", "bias"))
        for _ in range(2)
    ]
    first, second = (
        layer for layer in plait.PipelineModel(specs).modules() if isinstance(layer, nn.Linear)
    )
    assert first is not second
    assert first.weight is second.weight and first.bias is second.bias
    alone = [
        plait.TiedLayerSpec("once", nn.Linear, 4, 4, tied_weight_attr="weight") for _ in range(2)
    ]
    first, second = (
        layer for layer in plait.PipelineModel(alone).modules() if isinstance(layer, nn.Linear)
    )
    assert first.weight is second.weight and first.bias is not second.bias


def test_tied_ones_have_one_shape():
    specs = [plait.TiedLayerSpec("twice", nn.Linear, 4, width) for width in (4, 5)]
    with pytest.raises(ModelError, match="'twice': weight has the shapes"):
        plait.PipelineModel(specs)
