"""The plan of a model with low-rank adapters, which are built here as PEFT names them."""

import pytest
import torch
from torch import nn

from plait.errors import ModelError
from plait.model.adapters import adapted_layers, without_wrapper
from plait.model.plans import make_plan
from tests.parity import trainers


class Lora(nn.Module):
    def __init__(self, base, dropout=0.0, extra=""):
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})
        if extra:
            self.add_module(extra, nn.ModuleDict({"default": nn.Linear(2, 2)}))


def adapted(names=("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"), **given):
    with torch.device("meta"):
        model = trainers.model()
    for layer in model.model.layers:
        for name in names:
            parent, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(parent), leaf, Lora(layer.get_submodule(name), **given))
    return model, [f"model.layers.{index}" for index in range(len(model.model.layers))]


def test_the_sides_of_an_adapter():
    """B with the columns of its layer, A with its rows; everything else as without."""
    with torch.device("meta"):
        bare = trainers.model()
    model, blocks = adapted()
    wanted, found = make_plan(bare, tp=2, blocks=blocks), make_plan(model, tp=2, blocks=blocks)
    assert (
        set(found.dims) == {name for name, _ in model.named_parameters()}
        and len(adapted_layers(model)) == 6
    )
    here = "model.layers.1.self_attn"
    assert (
        found.dims[f"{here}.q_proj.lora_A.default.weight"],
        found.dims[f"{here}.q_proj.lora_B.default.weight"],
    ) == (None, 0)
    assert (
        found.dims[f"{here}.o_proj.lora_A.default.weight"],
        found.dims[f"{here}.o_proj.lora_B.default.weight"],
    ) == (1, None)
    for name, dim in wanted.dims.items():
        owner, _, leaf = name.rpartition(".")
        assert found.dims.get(name, found.dims.get(f"{owner}.base_layer.{leaf}")) == dim
    assert (
        found.styles[f"{here}.q_proj.base_layer"] == "colwise"
        and f"{here}.q_proj" not in found.styles
    )
    assert (found.heads, found.attributes, found.kv_heads) == (
        wanted.heads,
        wanted.attributes,
        wanted.kv_heads,
    )
    assert isinstance(model.get_submodule(f"{here}.q_proj"), Lora)  # it is as it was
    user = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    assert (
        make_plan(model, tp=2, user=user, blocks=blocks).dims[
            "model.layers.0.mlp.down_proj.lora_A.default.weight"
        ]
        == 1
    )


def test_summed_matrices():
    """Under sequence parallelism A of a column-split layer and B of a row-split one are summed."""
    model, blocks = adapted()
    plan = make_plan(model, tp=2, blocks=blocks)
    assert plan.sequence_parallel is True
    assert plan.adapters == tuple(
        f"{block}.{layer}.default"
        for block in blocks
        for layer in ("mlp.down_proj.lora_B", "self_attn.o_proj.lora_B", "self_attn.q_proj.lora_A")
    )


def test_refused():
    for given, says in (
        ({"dropout": 0.1}, "use lora_dropout=0"),
        ({"extra": "lora_magnitude_vector"}, "lora_magnitude_vector"),
    ):
        model, blocks = adapted(**given)
        with pytest.raises(ModelError, match=says):
            make_plan(model, tp=2, blocks=blocks)
    model, blocks = adapted(("self_attn.k_proj",))
    with pytest.raises(ModelError, match="kv_replicated"):  # more ranks than heads of keys
        make_plan(model, tp=4, blocks=blocks)
    model, blocks = adapted(())
    model.lm_head = Lora(model.lm_head)
    with pytest.raises(ModelError, match="split over the vocabulary.*modules_to_save"):
        make_plan(model, tp=2, blocks=blocks)


def test_model_inside_of_a_wrapper():
    """A model of Transformers with `add_adapter` has a `peft_config` and no wrapper."""
    model = nn.Linear(2, 2)
    assert without_wrapper(model) is model
    model.peft_config = {"default": None}
    assert without_wrapper(model) is model
    wrapper = nn.Sequential(model)
    wrapper.peft_config = {"default": None}
    wrapper.get_base_model = lambda: model
    assert without_wrapper(wrapper) is model
