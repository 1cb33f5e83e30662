"""Plans of models with low-rank adapters, which are built here as PEFT names them."""

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


LAYERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
BLOCKS = ("model.layers.0", "model.layers.1")


def base_model():
    with torch.device("meta"):
        model = trainers.model()
    assert len(model.model.layers) == len(BLOCKS)
    return model


def adapted(layers=LAYERS, **options):
    model = base_model()
    with torch.device("meta"):
        for block in BLOCKS:
            for layer in layers:
                parent, _, leaf = f"{block}.{layer}".rpartition(".")
                owner = model.get_submodule(parent)
                setattr(owner, leaf, Lora(owner.get_submodule(leaf), **options))
    return model


def test_an_adapter_is_split_along_one_side():
    """B has the columns of its layer, and A its rows. Everything else stays as without adapters."""
    model = adapted()
    expected = make_plan(base_model(), tp=2, blocks=BLOCKS)
    plan = make_plan(model, tp=2, blocks=BLOCKS)
    assert set(plan.dims) == {name for name, _ in model.named_parameters()}
    assert len(adapted_layers(model)) == 6

    attention = "model.layers.1.self_attn"
    assert plan.dims[f"{attention}.q_proj.lora_A.default.weight"] is None
    assert plan.dims[f"{attention}.q_proj.lora_B.default.weight"] == 0
    assert plan.dims[f"{attention}.o_proj.lora_A.default.weight"] == 1
    assert plan.dims[f"{attention}.o_proj.lora_B.default.weight"] is None
    assert plan.styles[f"{attention}.q_proj.base_layer"] == "colwise"
    assert f"{attention}.q_proj" not in plan.styles

    for name, dim in expected.dims.items():
        owner, _, leaf = name.rpartition(".")
        assert plan.dims.get(name, plan.dims.get(f"{owner}.base_layer.{leaf}")) == dim
    assert plan.heads == expected.heads and plan.kv_heads == expected.kv_heads
    assert plan.attributes == expected.attributes
    assert isinstance(model.get_submodule(f"{attention}.q_proj"), Lora), "planning changed it"

    user = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    custom = make_plan(model, tp=2, user=user, blocks=BLOCKS)
    assert custom.dims["model.layers.0.mlp.down_proj.lora_A.default.weight"] == 1


def test_sequence_parallelism_sums_replicated_sides():
    plan = make_plan(adapted(), tp=2, blocks=BLOCKS)
    assert plan.sequence_parallel is True
    sides = ("mlp.down_proj.lora_B", "self_attn.o_proj.lora_B", "self_attn.q_proj.lora_A")
    assert plan.adapters == tuple(f"{block}.{side}.default" for block in BLOCKS for side in sides)


def test_unsupported_adapters_are_refused():
    with_head = adapted(())
    with_head.lm_head = Lora(with_head.lm_head)
    for model, tp, message in (
        (adapted(dropout=0.1), 2, "use lora_dropout=0"),
        (adapted(extra="lora_magnitude_vector"), 2, "lora_magnitude_vector"),
        # There are more ranks than heads of keys.
        (adapted(("self_attn.k_proj",)), 4, "kv_replicated"),
        (with_head, 2, "split over the vocabulary.*modules_to_save"),
    ):
        with pytest.raises(ModelError, match=message):
            make_plan(model, tp=tp, blocks=BLOCKS)


def test_the_model_inside_of_a_wrapper():
    """A model of Transformers with `add_adapter` has a `peft_config` and no wrapper."""
    model = nn.Linear(2, 2)
    assert without_wrapper(model) is model
    model.peft_config = {"default": None}
    assert without_wrapper(model) is model
    wrapper = nn.Sequential(model)
    wrapper.peft_config = {"default": None}
    wrapper.get_base_model = lambda: model
    assert without_wrapper(wrapper) is model
