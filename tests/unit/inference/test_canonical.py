"""Canonical arithmetic in one process: what it computes, that the company of a row changes nothing, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
from plait._torch.operators import TorchDispatchMode, operator_name
from plait.errors import InputError
from plait.inference.canonical import attention as attentions
from plait.inference.canonical import call, exact_products, self_test, sums
from plait.inference.canonical.arithmetic import Arithmetic, log_softmax
from tests.parity import cases

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Of magnitudes over some orders."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (wide * torch.exp(torch.randn(shape, generator=generator, dtype=torch.float64))).to(dtype)


def canonical(function: Callable[..., torch.Tensor], *args: Any, parameters: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
    """What a function gives in the arithmetic; it may use no operator that is not known."""
    model = nn.ParameterList(nn.Parameter(one, requires_grad=False) for one in parameters)
    arithmetic = Arithmetic(model, None, keeps=True)
    with torch.no_grad(), arithmetic():
        found = function(*args, *model)
    assert not arithmetic.unknown
    return found


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_are_those_of_fractions(dtype: torch.dtype) -> None:
    x, weight = numbers(3, 37, dtype=dtype), numbers(4, 37, dtype=dtype, seed=1)
    found = canonical(F.linear, x, parameters=(weight,))
    for row in range(3):
        for column in range(4):
            exact = sum(Fraction(a) * Fraction(b) for a, b in zip(x[row].tolist(), weight[column].tolist(), strict=True))
            error = abs(Fraction(found[row, column].item()) - exact)
            assert error <= abs(exact) * Fraction(torch.finfo(dtype).eps) + Fraction(1, 1 << 35), (row, column)
    assert found.dtype == dtype


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_company_of_a_row_changes_nothing(dtype: torch.dtype) -> None:
    x, weight, bias = numbers(50, 96, dtype=dtype), numbers(53, 96, dtype=dtype, seed=1), numbers(53, dtype=dtype, seed=2)
    found = canonical(F.linear, x, parameters=(weight, bias))
    transposed = canonical(lambda one, w, b: torch.addmm(b, one, w), x, parameters=(weight.t().contiguous(), bias))
    assert torch.equal(found, transposed)
    for rows in (slice(0, 1), slice(7, 10), slice(33, 50)):
        assert torch.equal(canonical(F.linear, x[rows], parameters=(weight, bias)), found[rows])
    for columns in (slice(0, 1), slice(20, 53)):
        assert torch.equal(canonical(F.linear, x, parameters=(weight[columns], bias[columns])), found[:, columns])
    mixed = torch.cat([x, 1e4 * x.sign()])  # larger rows beside it
    assert torch.equal(canonical(F.linear, mixed.view(2, 50, 96), parameters=(weight, bias))[0], found)


def test_sums_of_integers_need_no_order() -> None:
    """Also at as many terms as a sum of 52 bits has place for, all of them the largest."""
    terms, bits = 4096, exact_products.bits_of(4096)
    x = torch.ones(2, terms, dtype=torch.float64) * (2.0 - 2.0**-20)
    exponents = exact_products.exponents(x)
    parts = exact_products.split(x, exponents, bits=bits, slices=3)
    left, right = exact_products.leading_first(parts), exact_products.leading_last(parts)
    for level, found in enumerate(exact_products.level_sums(left, right, slices=3)):
        exact = sum(int(a) * int(b) for i in range(level + 1) for a, b in zip(parts[i][0], parts[level - i][0], strict=True))
        assert int(found[0, 0]) == exact < 1 << 53


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention(dtype: torch.dtype) -> None:
    query, key, value = (numbers(2, 4, 23, 8, dtype=dtype, seed=seed) for seed in range(3))
    found = canonical(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True))
    wide = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True)
    bar = max(2 * torch.finfo(dtype).eps, 1e-13)
    assert torch.allclose(found.double(), wide, rtol=bar, atol=bar)
    last = canonical(lambda: F.scaled_dot_product_attention(query[:, :, 9:10], key[:, :, :10], value[:, :, :10]))
    assert torch.equal(last, found[:, :, 9:10])
    grouped = canonical(lambda: F.scaled_dot_product_attention(query, key[:, ::2], value[:, ::2], is_causal=True, enable_gqa=True))
    repeated = [one[:, ::2].repeat_interleave(2, 1) for one in (key, value)]
    assert torch.equal(grouped, canonical(lambda: F.scaled_dot_product_attention(query, *repeated, is_causal=True)))


@pytest.mark.parametrize("additive", [False, True])
def test_masked_keys_change_nothing_wherever_they_are(additive: bool) -> None:
    query, key, value = (numbers(1, 2, 11, 8, seed=seed) for seed in range(3))
    found = canonical(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True))
    for before, after in ((3, 0), (0, 40), (17, 5)):
        around = [
            torch.cat([1e6 * one[:, :, :1].expand(1, 2, before, 8), one, -1e6 * one[:, :, :1].expand(1, 2, after, 8)], 2)
            for one in (key, value)
        ]
        mask = F.pad(torch.ones(11, 11, dtype=torch.bool).tril(), (before, after))
        given = torch.zeros(11, 11 + before + after).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask
        assert torch.equal(canonical(F.scaled_dot_product_attention, query, *around, given), found)
    nothing = canonical(F.scaled_dot_product_attention, query, key, value, torch.zeros(11, 11, dtype=torch.bool))
    assert not nothing.any()


class Plain(nn.Module):
    """Attention in plain operators, with what a model may do to scores and weights."""

    def __init__(self, head_dim: int, weights: Callable[[torch.Tensor], torch.Tensor] = lambda weights: weights) -> None:
        super().__init__()
        self.head_dim, self._weights = head_dim, weights

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = 5 * torch.tanh(query @ key.mT / math.sqrt(self.head_dim) / 5) + mask
        return self._weights(torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)) @ value


def plain(layer: Plain, *args: torch.Tensor) -> tuple[torch.Tensor, set[str]]:
    """What it gives, and what is not known of it."""
    arithmetic = Arithmetic(layer, None, keeps=True)
    with torch.no_grad(), arithmetic():
        found: torch.Tensor = layer(*args)
    return found, arithmetic.unknown


@pytest.mark.parametrize("dtype", FLOATS)
def test_attention_in_plain_operators(dtype: torch.dtype) -> None:
    """A query's bits, whoever is beside it, and wherever keys are that it does not see; also where these are as many as a head is wide."""
    layer = Plain(8)
    query, key, value = (numbers(2, 4, 23, 8, dtype=dtype, seed=seed) for seed in range(3))
    low = torch.finfo(dtype).min
    mask = torch.zeros(23, 23, dtype=dtype).masked_fill(~torch.ones(23, 23, dtype=torch.bool).tril(), low)
    found, unknown = plain(layer, query, key, value, mask)
    wide = layer(*(one.double() for one in (query, key, value, mask)))
    bar = max(20 * torch.finfo(dtype).eps, 1e-6)
    assert not unknown and found.dtype == dtype and torch.allclose(found.double(), wide, rtol=bar, atol=bar * float(value.abs().max()))
    for seen in (1, 8, 23):
        last = slice(seen - 1, seen)
        alone, unknown = plain(layer, query[1:, 2:, last], key[1:, 2:, :seen], value[1:, 2:, :seen], mask[last, :seen])
        assert not unknown and torch.equal(alone, found[1:, 2:, last])
    for before, after in ((3, 0), (0, 40), (17, 5)):
        more = [
            torch.cat([100 * one[:, :, :1].expand(2, 4, before, 8), one, -100 * one[:, :, :1].expand(2, 4, after, 8)], 2)
            for one in (key, value)
        ]
        again, unknown = plain(layer, query, *more, F.pad(mask, (before, after), value=low))
        assert not unknown and torch.equal(again, found)


@pytest.mark.parametrize("keys", [1, 8, 9])
def test_weights_that_were_changed_are_not_known(keys: int) -> None:
    """Of one key and of as many as a head is wide, too."""
    query, key, value = (numbers(2, 4, keys, 8, seed=seed) for seed in range(3))
    for change in (lambda weights: weights * 1.5, lambda weights: weights + weights):
        _, unknown = plain(Plain(8, change), query, key, value, torch.zeros(keys, keys))
        assert len(unknown) == 1 and "aten.bmm.default, a product outside of linear layers and attention" in next(iter(unknown))


def test_sums_of_plain_attention_with_a_bias() -> None:
    """`baddbmm`, as ALiBi is added."""
    layer = Plain(8)
    query, key, bias = numbers(3, 5, 8), numbers(3, 7, 8, seed=1), numbers(3, 1, 7, seed=2)
    arithmetic = Arithmetic(layer, None, keeps=True)
    with torch.no_grad(), arithmetic():
        found = torch.baddbmm(bias, query, key.mT, beta=0.5, alpha=0.3)
        alone = torch.baddbmm(bias[1:2, :, 2:4], query[1:2, 3:4], key[1:2, 2:4].mT, beta=0.5, alpha=0.3)
    wide = 0.5 * bias.double() + 0.3 * (query.double() @ key.double().mT)
    assert not arithmetic.unknown and torch.allclose(found.double(), wide, atol=1e-4, rtol=1e-6)
    assert torch.equal(alone, found[1:2, 3:4, 2:4])


NORM = (numbers(24, seed=5), numbers(24, seed=6))
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (24,), *(one.to(x.dtype) for one in NORM)),
    "layer norm of two dimensions": lambda x: F.layer_norm(x, (2, 24)),
    "rms norm": lambda x: F.rms_norm(x, (24,), NORM[0].to(x.dtype), 1e-6),
    "rms norm, own eps": lambda x: F.rms_norm(x, (24,)),
    "mean": lambda x: x.mean(-1),
    "mean in float32": lambda x: x.mean(-1, keepdim=True, dtype=torch.float32),
    "sum": lambda x: x.sum(dim=-1, keepdim=True),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax in float32": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "log_softmax": lambda x: torch.log_softmax(x, -1),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "power": lambda x: x.abs() ** 1.5,
    "square": lambda x: x**2,
    "in place": lambda x: torch.sigmoid_(x.clone()),
    "strided": lambda x: torch.tanh(x.transpose(0, 1)).transpose(0, 1),
    "two tensors": lambda x: torch.addcmul(x, x, x.flip(0), value=0.3),
    "broadcast": lambda x: torch.pow(x.abs(), torch.tensor([[1.5], [2.5]])).to(x.dtype),
    "add times": lambda x: torch.add(x, x, alpha=0.1),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions(name: str, dtype: torch.dtype) -> None:
    """The values of torch, and of a row the same bits alone."""
    function, x = FUNCTIONS[name], numbers(9, 2, 24, dtype=dtype) / 4
    found, expected = canonical(function, x), function(x)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    wide = function(x.double()).double()
    bar = 4 * torch.finfo(found.dtype).eps
    assert torch.allclose(found.double(), wide, rtol=bar, atol=bar) or torch.allclose(found, expected, rtol=2 * bar, atol=2 * bar)
    if name not in ("two tensors",):
        for row in (0, 4, 8):
            assert torch.equal(canonical(function, x[row : row + 1]), found[row : row + 1])


class Seen(TorchDispatchMode):
    """Names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(operator_name(operator))
        return operator(*args, **(kwargs or {}))


def test_what_has_no_values_is_left_to_other_modes() -> None:
    """A pipeline's cut is checked on meta, in the first forward, which may be a canonical call's."""
    x, weight, bias = (torch.empty(shape, device="meta") for shape in ((4, 8), (8, 8), (8,)))
    arithmetic = Arithmetic(nn.Linear(8, 8), None, keeps=True)
    with torch.no_grad(), arithmetic(), Seen() as seen:
        found = F.silu(torch.addmm(bias, F.linear(x, weight), weight))
        F.scaled_dot_product_attention(*[found.view(1, 1, 4, 8)] * 3)
    assert found.is_meta and not arithmetic.unknown
    assert {"addmm", "silu"} < set(seen.names) and any("attention" in name or "bmm" in name for name in seen.names)
    assert any(name in ("mm", "linear", "t") for name in seen.names), "a linear layer is seen"


def test_sums_of_any_length() -> None:
    for length in (0, 1, 2, 3, 5, 8, 63, 64, 65, 1000):
        x = numbers(3, length, dtype=torch.float64)
        assert torch.allclose(sums.tree_sum(x)[:, 0], x.sum(-1), rtol=1e-12, atol=1e-12)


def test_log_probabilities() -> None:
    logits = numbers(4, 101)
    assert torch.allclose(log_softmax(logits), torch.log_softmax(logits, -1), atol=1e-6) and log_softmax(logits).dtype == torch.float32
    assert torch.equal(log_softmax(logits.double()).exp().sum(-1).round(decimals=12), torch.ones(4, dtype=torch.float64))
    assert torch.equal(log_softmax(logits.flip(-1)).flip(-1), log_softmax(logits))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: x.cumsum(-1), "aten.cumsum.default"),
        (lambda x: x @ x.mT, "aten.bmm.default"),
        (lambda x: x[0] @ x[0].T, "no parameters"),
        (lambda x: x.sum(), "along other dimensions"),
        (lambda x: x.mean(0), "along other dimensions"),
        (lambda x: torch.softmax(x, 0), "along another dimension"),
        (lambda x: torch.rand(3), "aten.rand.default"),
        (lambda x: F.conv1d(x, x), "aten.convolution.default"),
        (lambda x: torch.exp(x, out=x.clone()), "out="),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "dropout"),
    ],
)
def test_what_is_not_known_is_named(function: Callable[[torch.Tensor], torch.Tensor], named: str) -> None:
    arithmetic, x = Arithmetic(nn.Linear(2, 2), None, keeps=True), numbers(3, 4, 4)
    with torch.no_grad(), arithmetic():
        function(x)
    assert len(arithmetic.unknown) == 1 and named in next(iter(arithmetic.unknown))


def test_a_weight_that_moves_is_not_taken_for_another() -> None:
    """Where parameters may be freed and their memory used again, nothing is kept of them."""
    layer = nn.Linear(8, 8, bias=False)
    arithmetic = Arithmetic(layer, None, keeps=False)
    x = numbers(2, 8)
    with torch.no_grad(), arithmetic():
        before = layer(x)
        layer.weight.data.neg_()
        assert torch.equal(layer(x), -before)


class _Words:
    """A tokenizer of fewer tokens than the embedding has rows."""

    pad_token_id = 0

    def __len__(self) -> int:
        return 90


@pytest.fixture
def engine() -> Iterator[Any]:
    found = plait.initialize(cases.build("llama", tied=False, dtype=torch.float32, device="cpu"), {"train_micro_batch_size_per_gpu": 2})
    yield found
    found.close()


def test_scores(engine: Any) -> None:
    texts = [[5, 3, 8, 2], [7], [1, 2, 3, 4, 5, 6]]
    for row, text in zip(engine.score(texts), texts, strict=True):
        logits = engine.predict({"input_ids": torch.tensor([text])}).logits[0, :-1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(text[1:]).unsqueeze(1).long())[:, 0]
        assert row.shape == (len(text) - 1,) and torch.allclose(row, expected, atol=1e-5)
    whole = engine.score(texts, canonical=True, vocabulary=True)
    assert [tuple(one.shape) for one in whole] == [(len(text) - 1, cases.VOCABULARY) for text in texts]
    one_by_one = engine.score(texts, canonical=True, batch_size=1)
    for text, row, single in zip(texts, whole, one_by_one, strict=True):
        assert torch.equal(row.gather(1, torch.tensor(text[1:]).unsqueeze(1).long())[:, 0], single)
    assert engine.score(texts, canonical=True, vocabulary=True, tokenizer=_Words())[0].shape == (3, 90)
    for bad, message in (({"batch_size": 0}, "at least 1"), ({"sequences": [[]]}, "no token"), ({"sequences": [[101]]}, "token 101")):
        with pytest.raises(InputError, match=message):
            engine.score(**{"sequences": texts, **bad})


def test_training_goes_on_as_if_nothing_had_been_scored() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [7, 5, 3, 2]])
    losses = []
    for scores in (False, True):
        model = cases.build("llama", tied=False, dtype=torch.float32, device="cpu")
        engine = plait.initialize(model, {"train_micro_batch_size_per_gpu": 2}, loss_fn=plait.causal_lm_loss)
        found = []
        for _ in range(3):
            found.append(engine.train_batch({"input_ids": ids, "labels": ids}).loss)
            if scores:
                engine.score(ids, canonical=True)
        losses.append(found)
        engine.close()
    assert losses[0] == losses[1]


def test_refused(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str) -> None:
        for canonical_call in (engine.generate, engine.score):
            with pytest.raises(InputError, match=message) as found:
                canonical_call([[1, 2, 3]], canonical=True)
            assert "engine.score(sequences)" in str(found.value)

    with monkeypatch.context() as patch:
        patch.setattr(call, "MOST_KEYS", 2)
        refused("up to 2 keys")
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.sharded), "device", torch.device("meta"))
        with pytest.raises(InputError, match="CPUs only, and no kernels for meta"):
            call.check(engine.sharded, longest=3)
    with monkeypatch.context() as patch:
        patch.setattr(engine.module.config, "_attn_implementation", "flex_attention")
        refused('attention "flex_attention", but with scaled_dot_product_attention')
    with monkeypatch.context() as patch:
        patch.setattr(exact_products.torch, "matmul", lambda a, b, out: out.copy_(a.float() @ b.float()))
        refused("products of integers in float64 are not exact")
    with monkeypatch.context() as patch:
        patch.setattr(self_test, "elementwise", lambda function, tensors: function(tensors[0]) + 1e-3 * torch.arange(len(tensors[0])))
        refused("exp of an element depends on its place")
    with monkeypatch.context() as patch:
        patch.setattr(attentions, "exponentials", lambda x: (torch.softmax(x, -1) + 1e-4 * x.shape[-1], x.new_ones(*x.shape[:-1], 1)))
        refused("one query is not that query in the full pass")
    with pytest.raises(InputError, match="ranks 0 and 2 computed different bits"):
        call.compare([b"a", b"a", b"b"])
    engine.module.model.norm.register_forward_hook(lambda *args: args[-1].cumsum(-1))
    refused("aten.cumsum.default")


@pytest.mark.parametrize(
    ("kind", "config", "named"),
    [
        ("mixtral", {}, "a mixture of experts"),
        ("llama", {"compile": {"enabled": True}}, "torch.compile"),
        ("adapted", {}, "adapters"),
    ],
)
def test_what_is_not_proven_is_named(kind: str, config: dict[str, Any], named: str) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = cases.build("llama", tied=False, dtype=torch.float32, device="cpu")
    if kind == "mixtral":
        shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = MixtralForCausalLM(MixtralConfig(vocab_size=11, num_local_experts=2, **shape))
    if kind == "adapted":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    engine = plait.initialize(model, {"train_micro_batch_size_per_gpu": 1, **config}, loss_fn=plait.causal_lm_loss)
    try:
        with pytest.raises(InputError, match=f"not proven with .*{named}"):
            engine.score([[1, 2]], canonical=True)
    finally:
        engine.close()
