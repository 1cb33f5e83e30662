"""Models for a verification are small, and cut by a layout as the large ones are."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from plait.cluster.layout import Layout
from plait.verify import shrink

LLAMA_SIZES = {"vocab_size": 32001, "hidden_size": 4096, "intermediate_size": 11008}
LLAMA_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
LLAMA = {
    "model_type": "llama",
    **LLAMA_SIZES,
    **LLAMA_HEADS,
    "num_hidden_layers": 32,
    "attention_dropout": 0.1,
    "eos_token_id": [2, 32000],
}
GEMMA_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
DEGREES = st.lists(st.integers(2, 9), max_size=3)


@hypothesis.given(value=st.integers(1, 100_000), target=st.integers(1, 200), degrees=DEGREES)
def test_degrees_divide_a_small_size_as_the_large_one(value, target, degrees):
    small = shrink.like(value, target, degrees)
    for degree in degrees:
        assert (small % degree == 0) == (value % degree == 0)
    assert small >= target or small == value


@hypothesis.given(heads=st.integers(1, 71), groups=st.integers(1, 16), degrees=DEGREES)
def test_heads_are_cut_the_same_way(heads, groups, degrees):
    keys = max(1, heads // groups)
    small, small_keys = shrink.shrink_heads(heads, keys, degrees)
    assert small <= heads and small_keys <= keys
    assert (small == small_keys) == (heads == keys)
    assert (small_keys == 1) == (keys == 1)
    assert (small % small_keys == 0) == (heads % keys == 0)
    for degree in degrees:
        assert (small % degree == 0) == (heads % degree == 0)
        assert (small_keys % degree == 0) == (keys % degree == 0)
        assert (small_keys < degree) == (keys < degree), "replication of key heads"
        assert min(small // degree, 2) == min(heads // degree, 2), "several heads per rank"


def test_numbers_of_heads():
    for heads, keys, degrees, expected in (
        (32, 8, (), (4, 2)),
        (32, 8, (2,), (8, 4)),
        (32, 32, (2,), (4, 4)),
        (32, 1, (4,), (8, 1)),
        (71, 71, (2,), (5, 5)),
        (2, 2, (), (2, 2)),
    ):
        assert shrink.shrink_heads(heads, keys, degrees) == expected


def with_width(config, **degrees):
    return shrink.with_width(config, Layout(**degrees), head_size=8)


def test_llama():
    layout = Layout(tp=2, dp_shard=2)
    narrow = with_width(shrink.with_depth(LLAMA, 2), tp=2, dp_shard=2)
    small = shrink.with_small_vocabulary(narrow, layout)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "attention_dropout": 0.0}
    assert small.items() >= (heads | sizes).items()
    # 32,001 rows are sharded unevenly, so the small vocabulary is too.
    assert small["vocab_size"] % 2 == 1
    assert max(small["eos_token_id"]) < small["vocab_size"]
    assert LLAMA["num_hidden_layers"] == 32, "the given configuration changed"
    changes = list(map(str, shrink.changes(LLAMA, small)))
    assert {"num_hidden_layers 32 -> 2", "attention_dropout 0.1 -> 0.0"} <= set(changes)
    assert "model_type" not in "".join(changes)


def test_every_kind_of_layer_remains():
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    layers = {"layer_types": kinds, "mlp_only_layers": [0, 20], "first_k_dense_replace": 3}
    fields = {**LLAMA, "num_hidden_layers": 24, **layers}
    two = shrink.with_depth(fields, 2)
    assert two["num_hidden_layers"] == 2
    assert two["layer_types"] == ["sliding_attention", "full_attention"]
    assert two["mlp_only_layers"] == [0]
    assert two["first_k_dense_replace"] == 1
    four = shrink.with_depth(fields, 4)
    assert four["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]


def test_heads_that_are_not_the_hidden_size_stay_so():
    """A transposed weight of Gemma must not fit."""
    small = with_width({**LLAMA, "hidden_size": 2304, **GEMMA_HEADS}, tp=2)
    assert small["hidden_size"] != small["num_attention_heads"] * small["head_dim"]


def test_experts():
    experts = {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    small = with_width(LLAMA | experts)
    assert small["num_local_experts"] == 16
    assert small["num_experts_per_tok"] == 8
    assert small["moe_intermediate_size"] < 100
    longcat = {**LLAMA, "n_routed_experts": 512, "moe_topk": 12, "expert_ffn_hidden_size": 2048}
    assert with_width(longcat)["n_routed_experts"] == 24
    # Groups of experts would have to fit.
    assert with_width({**LLAMA, **experts, "n_group": 8})["num_local_experts"] == 128


@hypothesis.given(layers=st.integers(1, 60), depth=st.integers(1, 8))
def test_depth(layers, depth):
    assert shrink.depth_of(shrink.with_depth({"n_layer": layers}, depth)) == min(layers, depth)


def test_a_configuration_without_heads_is_refused():
    with pytest.raises(ValueError, match="hidden_size"):
        with_width({"vocab_size": 4})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3) for _ in range(5))
        self.layers = nn.ModuleList(layers)
        self.final = nn.Dropout(0.2)
        self.attention_dropout = 0.1
        self.p = 0.5


def test_blocks_are_cut():
    model = Model()
    assert shrink.cut_blocks(model, [f"layers.{index}" for index in range(5)], 2) == 5
    assert len(model.layers) == 2
    assert shrink.cut_blocks(model, ["layers.0", "layers.1"], 2) is None
    assert shrink.cut_blocks(model, ["layers.0", "final"], 1) is None


def test_dropout_is_switched_off():
    model = Model()
    shrink.without_dropout(model)
    assert model.attention_dropout == 0.0
    assert model.p == 0.5, "only a dropout layer's p is a probability of dropping"
    data = torch.randn(3, 2, 8)
    assert torch.equal(model.final(model.layers[0](data)), model.final(model.layers[0](data)))


GEMMA_TEXT = {
    "model_type": "gemma3_text",
    **GEMMA_HEADS,
    "hidden_size": 2304,
    "num_hidden_layers": 12,
    "vocab_size": 262208,
    "layer_types": ["sliding"] * 11 + ["full"],
}
VISION = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
GEMMA = {
    "model_type": "gemma3",
    "text_config": GEMMA_TEXT,
    "vision_config": {"model_type": "siglip", **VISION},
    "image_token_index": 262144,
}


def test_text_and_vision_parts_are_shrunk():
    assert shrink.depth_of(GEMMA) == 12
    narrow = with_width(shrink.with_depth(GEMMA, 3))
    small = shrink.with_small_vocabulary(narrow, Layout())
    text = small["text_config"]
    assert text["layer_types"] == ["sliding", "sliding", "full"] and text["num_hidden_layers"] == 3
    assert text["head_dim"] == 8 and text["hidden_size"] < 100 and text["vocab_size"] < 100
    assert small["vision_config"]["hidden_size"] < 100
    changes = list(map(str, shrink.changes(GEMMA, small)))
    assert "text_config.num_hidden_layers 12 -> 3" in changes


def test_sizes_of_single_layers_follow_them():
    sizes = {"num_hidden_layers": 6, "hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128}
    single = {"03": {"head_dim": 256}, "05": {"head_dim": 256}}
    shallow = shrink.with_depth({**sizes, "per_layer_config": single}, 2)
    assert shallow["num_hidden_layers"] == 2
    # A layer with its own size is another kind of layer.
    assert shallow["per_layer_config"] == {"1": {"head_dim": 256}}
    assert with_width(shallow)["per_layer_config"] == {"1": {"head_dim": 16}}


def test_encoder_and_decoder():
    fields = {"d_model": 1024}
    for side in ("encoder", "decoder"):
        fields |= {f"{side}_layers": 12, f"{side}_ffn_dim": 4096, f"{side}_attention_heads": 16}
    small = with_width(shrink.with_depth(fields, 2))
    assert small["encoder_layers"] == small["decoder_layers"] == 2
    assert small["encoder_attention_heads"] == small["decoder_attention_heads"]
    assert small["d_model"] == 8 * small["decoder_attention_heads"]
    assert small["decoder_ffn_dim"] == small["encoder_ffn_dim"] < 100


def test_state_space_layers():
    """The total size of the heads stays `expand` times the hidden size."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 4, "expand": 2, "chunk_size": 256}
    fields = {**sizes, "num_heads": 128, "head_dim": 64, "n_groups": 8}
    small = shrink.with_small_vocabulary(with_width(fields, tp=2), Layout(tp=2))
    assert small["num_heads"] * small["head_dim"] == 2 * small["hidden_size"] < 200
    assert small["num_heads"] % small["n_groups"] == 0 and small["chunk_size"] == 8
    sizes = {"hidden_size": 4096, "intermediate_size": 16384, "attention_hidden_size": 4096}
    assert with_width(sizes) == {name: size // 128 for name, size in sizes.items()}
