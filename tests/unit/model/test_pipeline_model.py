"""Layers of `PipelineModel` with one key share parameters, as in DeepSpeed."""

import pytest
from torch import nn

import plait
from plait.errors import ModelError


def tied_layers(**options):
    specs = [plait.TiedLayerSpec("key", nn.Linear, 4, 4, **options) for _ in range(2)]
    modules = plait.PipelineModel(specs).modules()
    return [module for module in modules if isinstance(module, nn.Linear)]


def test_all_named_attributes_are_tied():
    first, second = tied_layers(tied_weight_attr=("weight", "bias"))
    assert first is not second
    assert first.weight is second.weight and first.bias is second.bias
    first, second = tied_layers(tied_weight_attr="weight")
    assert first.weight is second.weight and first.bias is not second.bias


def test_tied_layers_need_one_shape():
    specs = [plait.TiedLayerSpec("key", nn.Linear, 4, width) for width in (4, 5)]
    with pytest.raises(ModelError, match="'key': weight has the shapes"):
        plait.PipelineModel(specs)
