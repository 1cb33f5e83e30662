"""Guessed rules: right for plain transformers of several styles, cautious where the structure does not tell."""

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

WIDTH, HEADS = 16, 4
IDS = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2))


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def heads_of(x, count):
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


class Separate(nn.Module):
    """q, k, v and o, reshaped by a head count; norms over a head."""

    def __init__(self):
        super().__init__()
        self.n_heads = HEADS
        self.alpha, self.beta, self.gamma, self.delta = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def forward(self, x):
        layers = (self.alpha, self.beta, self.gamma)
        q, k, v = (heads_of(layer(x), self.n_heads) for layer in layers)
        return self.delta(attend(self.norm(q), self.norm(k), v))


class Fused(nn.Module):
    """[q | k | v] in one layer: no rank's columns are whole heads."""

    def __init__(self):
        super().__init__()
        self.n_head = HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (heads_of(part, self.n_head) for part in self.c_attn(x).chunk(3, -1))
        return self.c_proj(attend(q, k, v))


class Gated(nn.Module):
    """A gated MLP with names of its own and an odd width."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, 21), nn.Linear(21, WIDTH), nn.Linear(WIDTH, 21)

    def forward(self, x):
        return self.b(F.silu(self.a(x)) * self.c(x))


class Pair(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 21), nn.Linear(21, WIDTH)


class Mixing(Pair):
    """Looks like an MLP, but its middle mixes channels."""

    def forward(self, x):
        return self.down(torch.softmax(self.up(x), -1))


class Functional(Pair):
    def forward(self, x):
        return self.down(F.gelu(F.linear(x, self.up.weight, self.up.bias)))


class Two(nn.Module):
    """An MLP that cannot be tried: it needs a second argument."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 21), nn.Linear(21, WIDTH)

    def forward(self, x, scale):
        return self.fc2(F.gelu(self.fc1(x)) * scale)


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = attention(), mlp()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        inner = self.norm2(x)
        return x + (self.mlp(inner, 0.5) if isinstance(self.mlp, Two) else self.mlp(inner))


class Model(nn.Module):
    """A language model with learned positions, whose head may be tied."""

    def __init__(self, attention, mlp, *, tied=False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, mlp) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
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


def test_what_a_trial_proves_is_split_between_heads_and_channels():
    assert styles_of(Model(Separate, Gated)) == {
        **{f"blocks.*.attn.{name}": "colwise" for name in ("alpha", "beta", "gamma")},
        "blocks.*.attn.delta": "rowwise",
        "blocks.*.attn.norm": "replicated_with_grad_allreduce",
        "blocks.*.mlp.a": "colwise",
        "blocks.*.mlp.c": "colwise",
        "blocks.*.mlp.b": "rowwise",
        **ENDS,
    }


def test_a_fused_layer_and_channels_that_mix_are_gathered():
    assert styles_of(Model(Fused, Mixing)) == {
        "blocks.*.attn.c_attn": "colwise_gather_output",
        "blocks.*.attn.c_proj": "rowwise_split_input",
        "blocks.*.mlp.up": "colwise_gather_output",
        "blocks.*.mlp.down": "rowwise_split_input",
        **ENDS,
    }


def test_an_mlp_that_cannot_be_tried_is_known_by_its_names():
    found = styles_of(Model(Fused, Two))
    assert (found["blocks.*.mlp.fc1"], found["blocks.*.mlp.fc2"]) == ("colwise", "rowwise")


def test_a_weight_that_is_read_and_not_called_stays_whole():
    found = styles_of(Model(Fused, Functional))
    assert "blocks.*.mlp.up" not in found
    assert found["blocks.*.mlp.down"] == "colwise_gather_output"


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("attention", "mlp"), [(Separate, Gated), (Fused, Mixing), (Fused, Two), (Separate, Functional)]
)
def test_a_guessed_plan_computes_what_the_whole_model_does(attention, mlp, tied):
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


def test_meta_and_real_modules_are_guessed_alike():
    model = Model(Separate, Gated)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    real = guess_rules(model, find_blocks(model))
    assert torch.rand(1) == expected, "the global generator was used"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.blocks[0].attn.n_heads == HEADS and model.training
    with torch.device("meta"):
        assert guess_rules(Model(Separate, Gated), find_blocks(model)) == real


def test_blocks_that_differ_are_named_one_by_one():
    class Softened(Gated):
        def forward(self, x):
            return self.b(torch.softmax(self.a(x), -1) * self.c(x))

    model = Model(Fused, Gated)
    model.blocks[1].mlp = Softened()
    rules = guess_rules(model, find_blocks(model))
    assert {
        StyleRule("blocks.0.mlp.a", "colwise"),
        StyleRule("blocks.1.mlp.a", "colwise_gather_output"),
    } <= set(rules)
    assert StyleRule("blocks.*.attn.c_attn", "colwise_gather_output") in rules


def test_without_blocks_the_whole_model_is_looked_at():
    ends = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    model = randomise(nn.Sequential(ends[0], Gated(), ends[1]).double())
    plan = make_plan(model, tp=2, blocks=())
    middle = {"1.a": "colwise", "1.b": "rowwise", "1.c": "colwise"}
    assert plan.styles == {"0": "embedding_rowwise", **middle, "2": "vocab_head"}
    check(model, plan, lambda m: m(IDS), blocks=())


def test_a_vocabulary_of_two_possible_embeddings_stays_whole():
    model = Model(Fused, Gated)
    model.positions = nn.Embedding(VOCABULARY, WIDTH)
    assert not {"embedding_rowwise", "vocab_head"} & set(styles_of(model).values())


def test_what_torch_computes_past_its_modules_is_not_split():
    layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 32) for _ in range(2))
    model = nn.ModuleDict({"layers": layers})
    words = r"no plan is known for ModuleDict, and in layers.0 to layers.1 there is no nn.Linear"
    with pytest.raises(ModelError, match=words):
        make_plan(model, tp=2, blocks=("layers.0", "layers.1"))
