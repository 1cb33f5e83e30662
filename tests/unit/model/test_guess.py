"""Guessed rules are right for transformers of several styles, and cautious about others."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from plait.errors import ModelError
from plait.model.blocks import find_blocks
from plait.model.guess import guess_rules
from plait.model.layers import StyleRule
from plait.model.plans import make_plan
from tests.unit.model.families import VOCABULARY, family, logits
from tests.unit.model.simulate import check, randomise

WIDTH = 16
CHANNELS = 21
HEADS = 4
IDS = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2))


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def heads_of(x, count):
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


class SeparateAttention(nn.Module):
    """Attention with layers for q, k, v and o, whose names say nothing, and a norm per head."""

    def __init__(self):
        super().__init__()
        self.n_heads = HEADS
        for name in ("alpha", "beta", "gamma", "delta"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x):
        q = self.norm(heads_of(self.alpha(x), self.n_heads))
        k = self.norm(heads_of(self.beta(x), self.n_heads))
        return self.delta(attend(q, k, heads_of(self.gamma(x), self.n_heads)))


class FusedAttention(nn.Module):
    """Attention with [q | k | v] in one layer, of which no rank's columns are complete heads."""

    def __init__(self):
        super().__init__()
        self.n_head = HEADS
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.c_attn(x).chunk(3, -1)
        heads = self.n_head
        return self.c_proj(attend(heads_of(q, heads), heads_of(k, heads), heads_of(v, heads)))


class GatedMLP(nn.Module):
    """A gated MLP, whose names say nothing, with an odd width."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, CHANNELS)
        self.b = nn.Linear(CHANNELS, WIDTH)
        self.c = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x):
        return self.b(F.silu(self.a(x)) * self.c(x))


class MixingMLP(nn.Module):
    """Looks like an MLP, but mixes its channels."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, CHANNELS)
        self.down = nn.Linear(CHANNELS, WIDTH)

    def forward(self, x):
        return self.down(torch.softmax(self.up(x), -1))


class FunctionalMLP(MixingMLP):
    """Reads the weight of a layer that it does not call."""

    def forward(self, x):
        return self.down(F.gelu(F.linear(x, self.up.weight, self.up.bias)))


class ScaledMLP(nn.Module):
    """An MLP that cannot be tried alone, because it requires a second argument."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, CHANNELS)
        self.fc2 = nn.Linear(CHANNELS, WIDTH)

    def forward(self, x, scale):
        return self.fc2(F.gelu(self.fc1(x)) * scale)


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.attn = attention()
        self.mlp = mlp()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        scale = (0.5,) if isinstance(self.mlp, ScaledMLP) else ()
        return x + self.mlp(self.norm2(x), *scale)


class Model(nn.Module):
    """A language model with learned positions."""

    def __init__(self, attention, mlp, *, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block(attention, mlp), Block(attention, mlp)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids):
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def styles_of(model):
    return {rule.pattern: rule.style for rule in guess_rules(model, find_blocks(model))}


ENDS = {"tokens": "embedding_rowwise", "head": "vocab_head"}


def test_a_trial_proves_where_heads_and_channels_may_be_split():
    assert styles_of(Model(SeparateAttention, GatedMLP)) == {
        **{f"blocks.*.attn.{name}": "colwise" for name in ("alpha", "beta", "gamma")},
        "blocks.*.attn.delta": "rowwise",
        "blocks.*.attn.norm": "replicated_with_grad_allreduce",
        "blocks.*.mlp.a": "colwise",
        "blocks.*.mlp.c": "colwise",
        "blocks.*.mlp.b": "rowwise",
        **ENDS,
    }


def test_fused_layers_and_mixed_channels_are_gathered():
    assert styles_of(Model(FusedAttention, MixingMLP)) == {
        "blocks.*.attn.c_attn": "colwise_gather_output",
        "blocks.*.attn.c_proj": "rowwise_split_input",
        "blocks.*.mlp.up": "colwise_gather_output",
        "blocks.*.mlp.down": "rowwise_split_input",
        **ENDS,
    }


def test_an_mlp_that_cannot_be_tried_is_known_by_its_names():
    styles = styles_of(Model(FusedAttention, ScaledMLP))
    assert (styles["blocks.*.mlp.fc1"], styles["blocks.*.mlp.fc2"]) == ("colwise", "rowwise")


def test_a_layer_that_is_not_called_is_not_split():
    styles = styles_of(Model(FusedAttention, FunctionalMLP))
    assert "blocks.*.mlp.up" not in styles
    assert styles["blocks.*.mlp.down"] == "colwise_gather_output"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("attention", "mlp"),
    [
        (SeparateAttention, GatedMLP),
        (FusedAttention, MixingMLP),
        (FusedAttention, ScaledMLP),
        (SeparateAttention, FunctionalMLP),
    ],
)
def test_a_guessed_plan_computes_the_unsplit_model(attention, mlp, tied):
    model = randomise(Model(attention, mlp, tied=tied).double())
    blocks = find_blocks(model)
    for tp in (2, 4):
        plan = make_plan(model, tp=tp, blocks=blocks)
        assert plan.source == "guessed" and plan.head == "head" and plan.embedding == "tokens"
        check(model, plan, lambda m: m(IDS), blocks=blocks)
        if plan.sequence_parallel is True:
            check(model, plan, lambda m: m(IDS), blocks=blocks, sequence=True)


@pytest.mark.parametrize("kind", ["bitnet", "diffllama", "mamba", "xlm", "roformer", "ctrl"])
def test_families_without_any_plan(kind):
    model = family(kind)
    blocks = find_blocks(model)
    plan = make_plan(model, tp=2, blocks=blocks)
    assert plan.source == "guessed"
    check(model, plan, logits, blocks=blocks)


def test_a_trial_changes_nothing_and_needs_no_weights():
    model = Model(SeparateAttention, GatedMLP)
    before = copy.deepcopy(model.state_dict())
    random_state = torch.random.get_rng_state()
    rules = guess_rules(model, find_blocks(model))
    assert torch.equal(torch.random.get_rng_state(), random_state)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.blocks[0].attn.n_heads == HEADS and model.training
    with torch.device("meta"):
        assert guess_rules(Model(SeparateAttention, GatedMLP), find_blocks(model)) == rules


def test_blocks_that_differ_are_named_one_by_one():
    class MixingGatedMLP(GatedMLP):
        def forward(self, x):
            return self.b(torch.softmax(self.a(x), -1) * self.c(x))

    model = Model(FusedAttention, GatedMLP)
    model.blocks[1].mlp = MixingGatedMLP()
    rules = guess_rules(model, find_blocks(model))
    assert StyleRule("blocks.0.mlp.a", "colwise") in rules
    assert StyleRule("blocks.1.mlp.a", "colwise_gather_output") in rules
    assert StyleRule("blocks.*.attn.c_attn", "colwise_gather_output") in rules


def test_a_model_without_blocks_is_tried_as_one():
    layers = (nn.Embedding(VOCABULARY, WIDTH), GatedMLP(), nn.Linear(WIDTH, VOCABULARY))
    model = randomise(nn.Sequential(*layers).double())
    plan = make_plan(model, tp=2, blocks=())
    middle = {"1.a": "colwise", "1.b": "rowwise", "1.c": "colwise"}
    assert plan.styles == {"0": "embedding_rowwise", **middle, "2": "vocab_head"}
    check(model, plan, lambda m: m(IDS), blocks=())


def test_a_vocabulary_with_two_possible_embeddings_is_not_split():
    model = Model(FusedAttention, GatedMLP)
    model.positions = nn.Embedding(VOCABULARY, WIDTH)
    assert not {"embedding_rowwise", "vocab_head"} & set(styles_of(model).values())


def test_layers_that_torch_computes_without_modules_are_refused():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32)
    model = nn.ModuleDict({"layers": nn.ModuleList([layer, copy.deepcopy(layer)])})
    message = r"no plan is known for ModuleDict, .* was found in layers.0 to layers.1;"
    with pytest.raises(ModelError, match=message):
        make_plan(model, tp=2, blocks=("layers.0", "layers.1"))
