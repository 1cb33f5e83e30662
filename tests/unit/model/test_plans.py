"""Tensor parallel plans of real families are right, and what they cannot do is refused."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from plait.errors import ConfigError, ModelError, PlaitError
from plait.model.blocks import find_blocks
from plait.model.plans import describe, make_plan, small_split_warning
from tests.unit.model.families import VOCABULARY, family, logits
from tests.unit.model.simulate import check, randomise

FIRST_FALCON = {"new_decoder_architecture": False, "multi_query": False}
FAMILIES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 1}),
    ("qwen2", {"num_key_value_heads": 1}),  # biased keys of one head
    ("qwen3", {}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("mistral", {}),
    ("phi", {"qk_layernorm": True}),  # a norm that Transformers' plan forgets
    ("phi3", {}),
    ("cohere", {"use_qk_norm": True}),  # a norm with weights for every head
    ("olmo2", {}),
    ("starcoder2", {}),
    ("apertus", {}),  # an activation with weights that Transformers' plan forgets
    ("gpt_neox", {}),
    ("gpt2", {}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("gpt_neo", {}),
    ("gptj", {}),
    ("codegen", {}),
    ("gpt_bigcode", {}),
    ("gpt_bigcode", {"multi_query": False}),
    ("opt", {}),
    ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    ("bloom", {}),
    ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}),
    ("falcon", {}),
    ("falcon", {"alibi": True}),
    ("falcon", {**FIRST_FALCON, "multi_query": True}),
    ("falcon", {**FIRST_FALCON, "parallel_attn": False, "bias": True}),
    ("stablelm", {}),
    ("stablelm", {"qk_layernorm": True}),
    ("persimmon", {}),
    ("mpt", {}),
    ("bert", {}),
]
CASES = [(kind, changes, tp) for kind, changes in FAMILIES for tp in (2, 4)]


def names_of(model):
    return list(dict(model.named_parameters(remove_duplicate=False)))


def described(plan, model):
    """Return the rows of a plan by the name of their parameter."""
    return {row.parameter: row for row in describe(plan, model)}


def plan_of(model, tp, user=None):
    return make_plan(model, tp=tp, user=user, blocks=find_blocks(model))


@pytest.mark.parametrize(
    ("kind", "changes", "tp"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{'-'.join(case[1]) or 'plain'}-{case[2]}",
            # Each family runs with one of the degrees in `make test`.
            marks=[] if index % 4 in (0, 3) else pytest.mark.proof,
        )
        for index, case in enumerate(CASES)
    ],
)
def test_the_plan_of_a_family_computes_the_unsplit_model(kind, changes, tp):
    model = family(kind, **changes)
    blocks = find_blocks(model)
    plan = make_plan(model, tp=tp, blocks=blocks)
    assert set(plan.dims) == set(names_of(model))
    total = sum(parameter.numel() for parameter in model.parameters())
    split = sum(p.numel() for name, p in model.named_parameters() if plan.dims[name] is not None)
    assert split >= 0.55 * total
    check(model, plan, logits, blocks=blocks)
    if plan.sequence_parallel is True:
        check(model, plan, logits, blocks=blocks, sequence=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "falcon"])
def test_a_model_on_meta_gets_the_same_plan(kind):
    assert plan_of(family(kind, device="meta"), 2) == plan_of(family(kind), 2)


def test_the_plan_of_llama_in_full():
    plan = plan_of(family("llama", num_hidden_layers=1, tie_word_embeddings=False), 2)
    assert plan.dims == {
        "model.embed_tokens.weight": 0,
        "model.layers.0.self_attn.q_proj.weight": 0,
        "model.layers.0.self_attn.k_proj.weight": 0,
        "model.layers.0.self_attn.v_proj.weight": 0,
        "model.layers.0.self_attn.o_proj.weight": 1,
        "model.layers.0.mlp.gate_proj.weight": 0,
        "model.layers.0.mlp.up_proj.weight": 0,
        "model.layers.0.mlp.down_proj.weight": 1,
        "model.layers.0.input_layernorm.weight": None,
        "model.layers.0.post_attention_layernorm.weight": None,
        "model.norm.weight": None,
        "lm_head.weight": 0,
    }
    assert (plan.embedding, plan.head) == ("model.embed_tokens", "lm_head")
    assert plan.source == "transformers' plan of llama"
    assert plan.styles["lm_head"] == "vocab_head"
    assert plan.attributes == () and plan.kv_heads == {}


def test_fewer_key_heads_than_ranks_are_replicated():
    plan = plan_of(family("qwen3", num_hidden_layers=1), 4)
    attention = "model.layers.0.self_attn"
    keys = f"{attention}.k_proj"
    values = f"{attention}.v_proj"
    assert plan.styles[keys] == plan.styles[values] == "kv_replicated"
    assert plan.kv_heads == {keys: 2, values: 2}
    assert plan.dims[f"{keys}.weight"] is None
    assert plan.attributes == ((attention, "num_key_value_groups", 1),)
    assert plan.styles[f"{attention}.q_norm"] == "replicated_with_grad_allreduce"


def test_shapes_of_linear_layers_by_columns_and_by_rows():
    with torch.device("meta"):
        model = nn.ModuleDict({"columns": nn.Linear(4096, 4096), "rows": nn.Linear(4096, 4096)})
    rows = described(plan_of(model, 4, {"columns": "colwise", "rows": "rowwise"}), model)
    assert rows["columns.weight"].local_shape == (1024, 4096)
    assert rows["columns.bias"].local_shape == (1024,)
    assert rows["rows.weight"].local_shape == (4096, 1024)
    assert rows["rows.bias"].local_shape == (4096,)


def test_every_parameter_is_described():
    model = family("llama", tie_word_embeddings=True)
    rows = described(plan_of(model, 4), model)
    assert list(rows) == names_of(model)
    down = rows["model.layers.0.mlp.down_proj.weight"]
    assert (down.style, down.local_shape) == ("rowwise", (32, 14))
    assert down.note == "uneven: 14 to 11 of 53, 5.7 % above an equal share"
    assert rows["model.norm.weight"].style == "replicated"
    values = rows["model.layers.1.self_attn.v_proj.weight"]
    assert values.note == "2 heads for 4 ranks: each computes one"
    assert rows["lm_head.weight"].note.endswith("tied to model.embed_tokens.weight")


def test_an_embedding_with_max_norm_and_its_head_are_not_split():
    model = family("llama", tie_word_embeddings=True)
    model.model.embed_tokens.max_norm = 1.0
    plan = plan_of(model, 2)
    assert plan.embedding is None and plan.head is None
    assert plan.dims["model.embed_tokens.weight"] is None and plan.dims["lm_head.weight"] is None

    # Gemma's embedding scales its output only.
    plan = plan_of(family("gemma", device="meta"), 2)
    assert (plan.embedding, plan.head) == ("model.embed_tokens", "lm_head")
    assert plan.dims["model.embed_tokens.weight"] == plan.dims["lm_head.weight"] == 0


def test_a_wrapper_has_the_ends_of_the_model_inside():
    plan = plan_of(nn.ModuleDict({"language": family("gpt2", device="meta")}), 2)
    assert (plan.embedding, plan.head) == ("language.transformer.wte", "language.lm_head")
    assert plan.final_norm == "language.transformer.ln_f"


def test_a_module_in_two_places_has_one_split():
    shared = nn.Linear(4, 8)
    model = nn.ModuleDict({"first": shared, "second": shared, "down": nn.Linear(8, 4)})
    plan = plan_of(model, 2, {"first": "colwise", "down": "rowwise"})
    assert plan.dims["first.weight"] == plan.dims["second.weight"] == 0
    assert described(plan, model)["second.weight"].style == "colwise"


def test_the_style_of_a_container_goes_to_owners_of_parameters():
    norms = nn.ModuleDict({"q": nn.LayerNorm(4), "k": nn.LayerNorm(4)})
    model = nn.ModuleDict({"up": nn.Linear(4, 8), "norms": norms})
    plan = plan_of(model, 2, {"up": "colwise", "norms": "replicated_with_grad_allreduce"})
    assert [entry.name for entry in plan.modules] == ["up", "norms.q", "norms.k"]


SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 48}
THREE_KEY_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96}


@pytest.mark.parametrize(
    ("kind", "tp", "changes", "message"),
    [
        ("llama", 3, {}, "num_attention_heads is 4 and 4 % 3 != 0; use 1, 2 or 4"),
        ("llama", 4, SIX_HEADS, "num_attention_heads is 6 and 6 % 4 != 0; use 1, 2, 3 or 6"),
        ("llama", 4, THREE_KEY_HEADS, "neither 3 % 4 nor 4 % 3 is 0; use 1, 3, 6 or 12"),
        ("falcon", 4, {"num_kv_heads": 2}, "keys together with queries; use 1 or 2"),
        ("gpt2", 120, {}, "transformer.wte has 101 rows, of .* 101 ranks would get some; use 11"),
        ("phi3", 16, {"vocab_size": 17}, "has 17 rows, of .* 9 ranks would get some; use 6"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_numbers(kind, tp, changes, message):
    with pytest.raises(ConfigError, match=rf"(?m)parallel\.tp = {tp}: .*{message}$"):
        plan_of(family(kind, device="meta", **changes), tp)


class PlainAttention(nn.Module):
    """Attention of no library, with fewer heads of keys."""

    def __init__(self, width=16, key_width=8):
        super().__init__()
        self.n_heads = 4
        self.n_kv_heads = 2
        self.wq = nn.Linear(width, width)
        self.wk = nn.Linear(width, key_width)
        self.wv = nn.Linear(width, key_width)
        self.wo = nn.Linear(width, width)

    def forward(self, x, mask):
        def heads(y, count):
            return y.view(*x.shape[:2], count, 4).transpose(1, 2)

        groups = self.n_heads // self.n_kv_heads
        q = heads(self.wq(x), self.n_heads)
        k = heads(self.wk(x), self.n_kv_heads).repeat_interleave(groups, 1)
        v = heads(self.wv(x), self.n_kv_heads).repeat_interleave(groups, 1)
        mixed = torch.softmax(q @ k.transpose(-1, -2) + mask, -1) @ v
        return self.wo(mixed.transpose(1, 2).flatten(2))


class PlainModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.layers = nn.ModuleList([PlainAttention(), PlainAttention()])

    def forward(self, ids):
        hidden = self.embed(ids)
        mask = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = hidden + layer(norm(hidden), mask)
        return self.head(hidden)


def test_a_custom_plan_for_a_plain_model():
    model = randomise(PlainModel().double())
    user = dict.fromkeys(("layers.*.wq", "layers.*.wk", "layers.*.wv"), "colwise")
    user |= {"layers.*.wo": "rowwise", "embed": "embedding_rowwise", "head": "vocab_head"}
    ids = torch.randint(0, VOCABULARY, (2, 5))
    for tp in (2, 4):
        plan = make_plan(model, tp=tp, user=user, blocks=())
        counts = {name: value for owner, name, value in plan.attributes if owner == "layers.0"}
        assert counts == {"n_heads": 4 // tp, "n_kv_heads": 1}
        assert (plan.head, plan.embedding) == ("head", "embed")
        check(model, plan, lambda m: m(ids), blocks=())


def test_a_cut_through_a_head_is_refused():
    # Attention without a known number of heads.
    layers = nn.ModuleDict({"q_proj": nn.Linear(10, 10), "o_proj": nn.Linear(10, 10)})
    message = r"attn.q_proj has 10 outputs and 10 % 4 != 0, so a head would be cut; use 2"
    with pytest.raises(ConfigError, match=message):
        plan_of(
            nn.ModuleDict({"attn": layers}), 4, {"attn.q_proj": "colwise", "attn.o_proj": "rowwise"}
        )


@pytest.mark.parametrize(
    ("pattern", "style", "message"),
    [
        ("layers.*.mlp.gate", "colwise", "names no module; near it are model.layers.*.mlp"),
        ("layers.*.input_layernorm", "colwise", r"\(LlamaRMSNorm\) .* must be an nn.Linear"),
        ("layers.*.mlp.up_proj", "embedding_rowwise", "it must be an nn.Embedding"),
        ("layers.*.mlp.act_fn", "replicated_with_grad_allreduce", "has no parameters"),
        ("layers.*.self_attn.k_proj", "kv_replicated", "2 heads are not .* use .* 'colwise'"),
        ("layers.*.mlp.up_proj", "kv_replicated", "its number of heads is not known"),
        ("norm", "replicated_with_grad_allreduce", "no parameter of LlamaForCausalLM is split"),
        ("embed_tokens", "embedding_rowwise", "one tied parameter would be split .* lm_head"),
    ],
)
def test_custom_plans_that_do_not_fit_are_refused(pattern, style, message):
    model = family("llama", device="meta", tie_word_embeddings=True)
    with pytest.raises(PlaitError, match=message):
        plan_of(model, 2, {f"model.{pattern}": style})


def test_layers_that_are_not_called_or_not_plain_are_refused():
    attention = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
    with pytest.raises(ModelError, match="attn.out_proj belongs to an nn.MultiheadAttention"):
        plan_of(attention, 2, {"attn.out_proj": "rowwise"})

    class ScaledLinear(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(ModelError, match=r"up \(ScaledLinear\) cannot be 'colwise'"):
        plan_of(nn.ModuleDict({"up": ScaledLinear(4, 8)}), 2, {"up": "colwise"})
    patched = nn.ModuleDict({"up": nn.Linear(4, 8)})
    patched["up"].forward = lambda x: x
    with pytest.raises(ModelError, match=r"up \(Linear\) cannot be 'colwise'"):
        plan_of(patched, 2, {"up": "colwise"})


def test_a_norm_per_head_is_refused_in_a_custom_plan():
    user = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    user["model.layers.*.self_attn.o_proj"] = "rowwise"
    remedy = "use 'colwise_gather_output' and 'rowwise_split_input'"
    with pytest.raises(ModelError, match=rf"q_norm has weights for each of 4 heads, .* {remedy}"):
        plan_of(family("cohere", device="meta", use_qk_norm=True), 2, user)


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("opt", {}, "OPT's blocks flatten batch and sequence"),
        ("gpt2", {"resid_pdrop": 0.1}, r"resid_dropout drops with p = 0.1"),
        ("bloom", {"hidden_dropout": 0.2}, "hidden_dropout = 0.2, and a part of transformer.h.0"),
        ("mixtral", {"attention_dropout": 0.1}, "attention_dropout = 0.1, and a part of model"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention reads a second sequence"),
        ("bert", {}, r"attention holds output.LayerNorm \(LayerNorm\)"),
        ("doge", {}, "has a parameter of its own"),
        ("ctrl", {}, "multi_head_attention takes a second input, k"),
    ],
)
def test_sequence_parallelism_is_refused_with_the_reason(kind, changes, reason):
    possible = plan_of(family(kind, device="meta", **changes), 2).sequence_parallel
    assert possible is not True
    assert re.search(reason, possible)


def test_dropout_on_sequence_shards_is_no_reason():
    """Ranks draw different numbers there."""
    model = family("gpt_neox", device="meta", hidden_dropout=0.1, attention_dropout=0.1)
    assert plan_of(model, 2).sequence_parallel is True


def test_sequence_parallelism_needs_known_parts_of_blocks():
    model = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    user = {"up": "colwise", "down": "rowwise"}
    assert "no list of repeated blocks" in str(plan_of(model, 2, user).sequence_parallel)
    block = nn.ModuleDict({**model, "mixer": nn.Conv1d(4, 4, 3)})
    user = {"*.up": "colwise", "*.down": "rowwise"}
    plan = make_plan(nn.ModuleList([block]), tp=2, user=user, blocks=("0",))
    assert plan.sequence_parallel == "0.mixer (Conv1d) is neither a norm nor split over tp"


def with_styles(plan, styles):
    """Return a plan with other styles for modules, by the last part of their names.

    None removes a module from the plan.
    """
    modules = []
    for entry in plan.modules:
        style = styles.get(entry.name.split(".")[-1], entry.style)
        if style is not None:
            modules.append(replace(entry, style=style))
    return replace(plan, modules=tuple(modules))


def test_the_reference_notices_wrong_plans():
    # With 52 channels, half of phi3's [gate | up] has an even width, so no shape is wrong.
    fused = family("phi3", intermediate_size=52)
    split = {"gate_up_proj": "colwise", "down_proj": "rowwise"}
    with pytest.raises(AssertionError, match="the output differs"):
        check(fused, with_styles(plan_of(fused, 2), split), logits, blocks=find_blocks(fused))

    qwen3 = family("qwen3")
    plan = with_styles(plan_of(qwen3, 2), {"q_norm": None})
    with pytest.raises(AssertionError, match="q_norm.weight differs"):
        check(qwen3, plan, logits, blocks=find_blocks(qwen3))

    llama = family("llama")
    blocks = find_blocks(llama)
    plan = plan_of(llama, 2)
    norm = replace(plan.modules[0], name="model.norm", style="replicated_with_grad_allreduce")
    with pytest.raises(AssertionError, match="model.norm.weight differs"):
        check(llama, replace(plan, modules=(*plan.modules, norm)), logits, blocks=blocks)
    with pytest.raises(AssertionError, match="input_layernorm.weight differs"):
        check(llama, replace(plan, norms=plan.norms[1:]), logits, blocks=blocks, sequence=True)


def test_a_plan_that_splits_little_is_reported():
    """The warning names the largest layers that are not split."""
    layers = {"tower": nn.Linear(100, 100), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
    model = nn.ModuleDict(layers)
    plan = plan_of(model, 2, {"up": "colwise", "down": "rowwise"})
    warning = small_split_warning(plan, model)
    assert "splits 2.6% of the parameters" in warning and "tower.weight" in warning
    # Expert parallelism splits the excluded parameters.
    assert small_split_warning(plan, model, excluded=("tower.weight",)) is None
    warning = small_split_warning(plan, model, excluded=("up.weight", "down.weight"))
    assert "splits 0.2% of the parameters besides experts" in warning

    llama = family("llama", device="meta")
    assert small_split_warning(plan_of(llama, 2), llama) is None


class Adapter(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer


class Wrapper(nn.Module):
    """A wrapper that passes on attributes of the model inside, as peft's does."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inner"], name)


def test_unknown_adapters_are_refused_by_name():
    """A wrapper gets the plan of the model inside, in which the refusal names the layer."""
    model = family("llama", device="meta")
    plan = make_plan(Wrapper(model), tp=2, blocks=("inner.model.layers.0", "inner.model.layers.1"))
    assert plan.styles["inner.model.layers.0.mlp.up_proj"] == "colwise"
    attention = model.get_submodule("model.layers.1.self_attn")
    attention.q_proj = Adapter(attention.q_proj)
    message = r"inner.model.layers.1.self_attn.q_proj is Adapter, an adapter around a layer"
    with pytest.raises(ModelError, match=message):
        make_plan(Wrapper(model), tp=2, blocks=())


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_whose_weight_is_read_is_not_split(tied):
    """Gemma 4 reads the row of the padding, which may be on another rank."""
    model = family("llama", tie_word_embeddings=tied)

    class WeightReadingModel(type(model)):
        def forward(self, *args, **kwargs):
            padding = self.model.embed_tokens.weight[0]
            return super().forward(*args, **kwargs), padding

    blocks = find_blocks(model, None)
    assert make_plan(model, tp=2, blocks=blocks).embedding == "model.embed_tokens"
    model.__class__ = WeightReadingModel
    plan = make_plan(model, tp=2, blocks=blocks)
    assert plan.embedding is None and plan.dims["model.embed_tokens.weight"] is None
    assert (plan.head is None) == tied and (plan.dims["lm_head.weight"] is None) == tied
