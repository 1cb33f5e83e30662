"""Which modules' tokens are computed in parts is found by trying them, and what mixes tokens is refused by name."""

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


def found(model):
    return find_mlps(model, find_blocks(model), setting=SETTING)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox", "phi3", *SIZES])
def test_families(family):
    """Every MLP and every layer of experts is found, and the shared experts of a layer."""
    model = build(Case(family)) if family in SIZES else cases.build(family, tied=False)
    names = [name for name, _ in model.named_modules()]
    one = found(model)
    assert one.experts == tuple(name for name in names if name.endswith(".mlp.experts"))
    shared = {name for name in names if name.endswith(("shared_expert", "shared_experts"))}
    mlps = {name for name in names if name.endswith(".mlp") and f"{name}.experts" not in names}
    assert set(one.mlps) == shared | mlps


def test_a_wide_one_is_tried_narrower():
    """8192 x 28672 take 5 GiB in float64, but no memory on meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=64, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert found(model).mlps == ("model.layers.0.mlp", "model.layers.1.mlp")


def test_many_narrow_layers():
    """The model has more than a million parameters, of which no size is large."""
    model = nn.Module()
    model.blocks = nn.ModuleList()
    for _ in range(2):
        block = nn.Module()
        block.norm = nn.LayerNorm(40)
        block.mlp = nn.Sequential(*(nn.Linear(40, 40) for _ in range(660)))
        model.blocks.append(block)
    assert found(model).mlps == ("blocks.0.mlp", "blocks.1.mlp")


class Mlp(nn.Module):
    """One up and one down projection with a function between them."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 32), nn.Linear(32, 8), between
        self.calls, self.seen, self.lengths = 0, None, []
        self.up.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        return self.down(self.between(self, self.up(x)))


class Block(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mlp(between)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.blocks = nn.ModuleList([Block(between), Block(between)])


def capacity(_, x):
    """Of every eight tokens that would go to one place, four are dropped: the first eight alike."""
    flat = x.flatten(0, -2)
    earlier = (flat[:, None] == flat[None]).all(-1).tril().long().sum(1, keepdim=True)
    return torch.where(torch.cumsum(earlier > 4, 0) > 0, 0, flat).view_as(x)


def counting(module, x):
    module.seen = x
    return x


def averaging(module, x):
    module.up.mean.add_(x.mean())
    return x


def listing(module, x):
    module.lengths.append(x.shape[-2])
    return x


def over_the_sequence(_, x):
    return x - x.mean(-2, keepdim=True)


def of_the_token_before(_, x):
    return x + F.pad(x, (0, 0, 1, 0))[..., :-1, :]


def alone(_, x):
    return F.gelu(x) * x.square().mean(-1, keepdim=True)


MIXED = r"blocks.0.mlp.up is not computed in tiles, because of blocks.0.mlp \(Mlp\): a token's output depends on other tokens"


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (over_the_sequence, MIXED),
        (of_the_token_before, MIXED),
        (capacity, MIXED),
        (counting, "a call changes its seen"),
        (averaging, "a call changes its up.mean"),
        (listing, "a call changes its lengths"),
    ],
)
def test_what_is_refused(between, message):
    """Outputs that depend on other tokens are refused, and attributes that only the last tile would leave."""
    with pytest.raises(ModelError, match=f"{SETTING}.*{message}"):
        found(Model(between))


def test_what_is_not():
    assert found(Model(alone)).mlps == ("blocks.0.mlp", "blocks.1.mlp")


def test_a_block_without_one():
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32, "vocab_size": 64}
    config = OPTConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
    words = r"model.decoder.layers.0.fc1 is not computed in tiles, .* \(OPTDecoderLayer\): the block computes"
    with pytest.raises(ModelError, match=words):
        found(OPTForCausalLM(config))


def test_hooks_inside():
    """A hook inside would receive tiles. The module's hook receives all tokens."""
    model = Model(alone)
    model.blocks[1].mlp.register_forward_hook(lambda *_: None)
    found(model)
    model.blocks[1].mlp.up.register_forward_hook(lambda *_: None)
    words = "blocks.1.mlp.up has a hook, which would receive a tile of the tokens; register it on blocks.1.mlp"
    with pytest.raises(ModelError, match=words):
        found(model)
