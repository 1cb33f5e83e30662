"""Modules that may be computed in tiles of tokens are found by trials.

Modules that mix tokens are refused by name.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait.errors import ModelError
from plait.model.blocks import find_blocks
from plait.parallel.mlps import find_mlps
from tests.parity import cases
from tests.parity.experts import SIZES, Case, build

SETTING = "parallel.mlp_tile_tokens = 4"


def tiled_modules(model):
    return find_mlps(model, find_blocks(model), setting=SETTING)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox", "phi3", *SIZES])
def test_mlps_and_experts_of_families(family):
    model = build(Case(family)) if family in SIZES else cases.build(family, tied=False)
    names = list(dict(model.named_modules()))
    tiled = tiled_modules(model)
    assert tiled.experts == tuple(name for name in names if name.endswith(".mlp.experts"))
    shared = {name for name in names if name.endswith(("shared_expert", "shared_experts"))}
    mlps = {name for name in names if name.endswith(".mlp") and f"{name}.experts" not in names}
    assert set(tiled.mlps) == shared | mlps


def test_a_wide_mlp_is_tried_narrower():
    """8192 x 28672 take 5 GiB in float64, but no memory on meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=64, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert tiled_modules(model).mlps == ("model.layers.0.mlp", "model.layers.1.mlp")


class Mlp(nn.Module):
    """An up and a down projection with a function between them."""

    def __init__(self, between):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)
        self.between = between
        self.last = None
        self.lengths = []
        self.up.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        return self.down(self.between(self, self.up(x)))


class Block(nn.Module):
    def __init__(self, width, mlp):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def two_blocks(make_mlp, width=8):
    blocks = [Block(width, make_mlp()), Block(width, make_mlp())]
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks)})


def test_many_narrow_layers():
    """The model has more than a million parameters, but no large layer."""
    model = two_blocks(lambda: nn.Sequential(*(nn.Linear(40, 40) for _ in range(660))), width=40)
    assert tiled_modules(model).mlps == ("blocks.0.mlp", "blocks.1.mlp")


def per_token(_, x):
    return F.gelu(x) * x.square().mean(-1, keepdim=True)


def subtract_sequence_mean(_, x):
    return x - x.mean(-2, keepdim=True)


def add_previous_token(_, x):
    return x + F.pad(x, (0, 0, 1, 0))[..., :-1, :]


def drop_over_capacity(_, x):
    """Keep four of eight equal tokens, as a router with a capacity does."""
    flat = x.flatten(0, -2)
    earlier = (flat[:, None] == flat[None]).all(-1).tril().long().sum(1, keepdim=True)
    return torch.where(torch.cumsum(earlier > 4, 0) > 0, 0, flat).view_as(x)


def keep_input(module, x):
    module.last = x
    return x


def average_in_a_buffer(module, x):
    module.up.mean.add_(x.mean())
    return x


def append_length(module, x):
    module.lengths.append(x.shape[-2])
    return x


MIXES = r"because of blocks.0.mlp \(Mlp\): a token's output depends on other tokens"


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (subtract_sequence_mean, MIXES),
        (add_previous_token, MIXES),
        (drop_over_capacity, MIXES),
        (keep_input, "a call changes its last"),
        (average_in_a_buffer, "a call changes its up.mean"),
        (append_length, "a call changes its lengths"),
    ],
)
def test_mlps_that_tiles_would_change_are_refused(between, message):
    """Outputs would change, or attributes would be those of the last tile."""
    with pytest.raises(ModelError, match=f"{SETTING}: blocks.0.mlp.*{message}"):
        tiled_modules(two_blocks(lambda: Mlp(between)))


def test_a_block_without_an_mlp_is_refused():
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32, "vocab_size": 64}
    config = OPTConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
    message = r"layers.0.fc1 is not computed in tiles, .* \(OPTDecoderLayer\): the block computes"
    with pytest.raises(ModelError, match=message):
        tiled_modules(OPTForCausalLM(config))


def test_a_hook_inside_would_receive_tiles():
    """A hook of the MLP itself receives all tokens."""
    model = two_blocks(lambda: Mlp(per_token))
    model["blocks"][1].mlp.register_forward_hook(lambda *_: None)
    assert tiled_modules(model).mlps == ("blocks.0.mlp", "blocks.1.mlp")
    model["blocks"][1].mlp.up.register_forward_hook(lambda *_: None)
    message = "mlp.up has a hook, which would receive a tile of .*; register it on blocks.1.mlp"
    with pytest.raises(ModelError, match=message):
        tiled_modules(model)
