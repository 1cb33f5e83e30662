"""Cross entropy in chunks has the value and gradients of the plain one, in less memory."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import plait
from plait.dryrun.recorder import LiveStorages
from plait.errors import ConfigError, ModelError
from plait.losses.chunked_loss import ChunkedCausalLMLoss, deferred
from plait.losses.loss import causal_lm_loss, per_sample
from plait.parallel.micro_batches import default_forward
from plait.parallel.pipeline.split_backward import backward_inputs, backward_weights
from tests.parity import cases
from tests.unit.model.families import family

WIDTH = 12
VOCABULARY = 31


def data(*, seed=0, ragged=True):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 7, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, VOCABULARY, (3, 7), generator=generator)
    if ragged:
        labels[0, 3:] = -100
        labels[2] = -100
    return hidden, labels


def linear(bias=True):
    return nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=torch.float64)


def plain_loss(head, hidden, labels):
    return causal_lm_loss(cases.Output(head(hidden)), {"labels": labels})


def chunked_loss(head, hidden, labels, size=4):
    return plait.chunked_causal_lm_loss(hidden, head, labels, chunk_tokens=size)


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def both(head, hidden, labels, size=4):
    """Return loss, weight and gradients of the plain loss, and those of the chunked one."""
    results = []
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    for compute in (plain_loss, partial(chunked_loss, size=size)):
        leaf = hidden.clone().requires_grad_()
        total, weight = compute(head, leaf, labels)
        gradients = torch.autograd.grad(total * 0.37, [leaf, *trained])
        results.append([total, weight, *gradients])
    return results


@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_loss(bias):
    head = linear(bias)
    for ragged in (False, True):
        for size in (1, 5, 7, 21, 1000):
            assert_equal(*both(head, *data(ragged=ragged), size))


def test_without_targets_everything_is_zero():
    hidden, labels = data()
    _, chunked = both(linear(), hidden, torch.full_like(labels, -100))
    assert all(not part.any() for part in chunked)


def test_frozen_heads_and_frozen_models():
    head = linear().requires_grad_(False)
    assert_equal(*both(head, *data()))
    head.requires_grad_(True)
    total, _ = chunked_loss(head, *data())
    expected, _ = plain_loss(head, *data())
    assert_equal(
        torch.autograd.grad(total, head.weight), torch.autograd.grad(expected, head.weight)
    )


class ProductCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_products_of_the_head():
    """The forward computes logits and all gradients, in evaluation only logits, of three chunks."""
    head = linear(bias=False)
    hidden, labels = data()
    hidden.requires_grad_()
    for trained, products in ((True, 9), (False, 6)):
        head.requires_grad_(trained)
        with ProductCounter() as forward:
            total, _ = chunked_loss(head, hidden, labels, 7)
        with ProductCounter() as backward:
            total.backward()
        assert forward.count == products
        assert backward.count == 0
    with ProductCounter() as evaluation, torch.no_grad():
        total, _ = chunked_loss(head, hidden, labels, 7)
    assert not total.requires_grad
    assert evaluation.count == 3


def test_a_graph_that_is_used_twice():
    head = linear()
    hidden, labels = data()
    hidden.requires_grad_()
    leaves = [hidden, *head.parameters()]
    total, _ = chunked_loss(head, hidden, labels)
    expected, _ = plain_loss(head, hidden, labels)
    for factor, keep in ((0.25, True), (3.0, True), (2.0, False)):
        scale = torch.tensor(factor, dtype=torch.float64)
        gradients = torch.autograd.grad(total, leaves, scale, retain_graph=keep)
        assert_equal(gradients, torch.autograd.grad(expected, leaves, scale, retain_graph=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_recomputed_function(reentrant):
    head = linear()
    hidden, labels = data()

    def total(states):
        return chunked_loss(head, states.tanh(), labels)[0]

    results = []
    for recomputed in (True, False):
        leaf = hidden.clone().requires_grad_()
        loss = checkpoint(total, leaf, use_reentrant=reentrant) if recomputed else total(leaf)
        (loss * 0.3).backward()
        results.append([loss.detach(), leaf.grad, *(p.grad for p in head.parameters())])
        head.zero_grad()
    assert_equal(*results)


def test_a_head_with_adapters():
    """The head has a frozen matrix, a product of two small ones, and a bias."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = linear()
            self.base.weight.requires_grad_(False)
            self.down = nn.Linear(WIDTH, 3, bias=False, dtype=torch.float64)
            self.up = nn.Linear(3, VOCABULARY, bias=False, dtype=torch.float64)

        def forward(self, hidden):
            return self.base(hidden) + self.up(self.down(hidden))

    plain, chunked = both(Adapted(), *data())
    assert len(chunked) == 2 + 1 + 3
    assert_equal(plain, chunked)


class SumOfWeights(nn.Module):
    """Head whose two matrices have the same gradient.

    The gradient of `gain` is expanded, and `unused` has none.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=torch.float64))
        self.shift = nn.Parameter(torch.ones(VOCABULARY, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(VOCABULARY, dtype=torch.float64))
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, hidden):
        return F.linear(hidden, self.first + self.second) * self.gain.sum() + self.shift


@pytest.mark.parametrize("size", [4, 1000])
def test_parameters_that_share_a_gradient(size):
    """Chunks are added up in place, so gradients that share memory need separate sums."""
    head = SumOfWeights()
    results = []
    for compute in (plain_loss, partial(chunked_loss, size=size)):
        head.zero_grad()
        total, _ = compute(head, *data())
        (total * 0.37).backward()
        assert head.unused.grad is None
        results.append([p.grad for p in (head.first, head.second, head.shift, head.gain)])
    assert_equal(*results)


@pytest.mark.parametrize("size", [16, 1000])
def test_float16_gradients_use_the_loss_scale(size):
    """Some sums would overflow in float16 and some probabilities would vanish without the scale."""
    labels = torch.zeros(2, 64, dtype=torch.int64)
    for value, weight, factor in ((2000.0, 1e-4, 1 / 128), (1e-4, 1.0, 4096.0)):
        head = nn.Linear(WIDTH, 2, bias=False)
        with torch.no_grad():
            head.weight.copy_(torch.tensor([[0.0] * WIDTH, [weight] * WIDTH]))
        hidden = torch.full((2, 64, WIDTH), value).half().requires_grad_()
        head = head.half()
        total, _ = chunked_loss(head, hidden, labels, size)
        gradients = torch.autograd.grad(total * factor, [hidden, head.weight])
        wide = nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64)
        wide.load_state_dict(head.state_dict())
        leaf = hidden.detach().double().requires_grad_()
        exact, _ = plain_loss(wide, leaf, labels)
        expected = torch.autograd.grad(exact * factor, [leaf, wide.weight])
        gradients = [gradient.double() for gradient in gradients]
        torch.testing.assert_close(gradients, [*expected], rtol=4e-3, atol=0)


def test_the_backward_uses_float16_autocast():
    head = nn.Linear(WIDTH, VOCABULARY)
    hidden, labels = data()
    results = []
    for compute in (plain_loss, chunked_loss):
        leaf = hidden.float().requires_grad_()
        with torch.autocast("cpu", torch.float16):
            total, _ = compute(head, leaf, labels)
        results.append(torch.autograd.grad(total * 8, [leaf, *head.parameters()]))
    # float16 has three digits, and the order of sums differs.
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_heads_with_hooks_or_other_weights_are_refused():
    """A hook would run once per chunk, and gradients of other layers' weights would be lost."""
    hidden, labels = data()
    hooked = linear()
    hooked.weight.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(ModelError, match="has a hook on its gradient"):
        chunked_loss(hooked, hidden, labels)

    embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)

    class Transposed(nn.Module):
        def forward(self, hidden):
            return F.linear(hidden, embedding.weight)

    with pytest.raises(ModelError, match="is not a parameter of the head"):
        chunked_loss(Transposed(), hidden.requires_grad_(), labels)
    embedding.requires_grad_(False)
    chunked_loss(Transposed(), hidden, labels)


@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_compiled():
    """torch.compile traces a user's function that computes the loss."""
    head = linear()
    hidden, labels = data()

    def total(states):
        return chunked_loss(head, states.tanh(), labels)[0] * 0.5

    leaves = [hidden.requires_grad_(), *head.parameters()]
    compiled = torch.compile(total, backend="aot_eager")
    actual = torch.autograd.grad(compiled(hidden), leaves)
    assert_equal(actual, torch.autograd.grad(total(hidden), leaves))


def test_a_split_backward():
    """Zero-bubble pipelines compute the input's gradient first, and those of weights later."""
    head = linear()
    first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    hidden, labels = data()
    received = hidden.requires_grad_()
    weights = [*first.parameters(), *head.parameters()]
    plain, _ = plain_loss(head, first(received), labels)
    expected = torch.autograd.grad(plain * 0.5, [received, *weights])
    total, _ = chunked_loss(head, first(received), labels)
    with ProductCounter() as products:
        weights_half = backward_inputs([total * 0.5], None, [received])
    assert received.grad is not None
    assert all(weight.grad is None for weight in weights)
    # The only product is that of the first layer.
    assert products.count == 1
    backward_weights(weights_half)
    assert_equal([received.grad, *(weight.grad for weight in weights)], [*expected])


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_gradients_have_the_parameters_dtype(kind):
    dtype = getattr(torch, kind)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    hidden, labels = data()
    leaf = hidden.to(dtype).requires_grad_()
    chunked_loss(head, leaf, labels)[0].backward()
    assert leaf.grad.dtype == head.weight.grad.dtype == head.bias.grad.dtype == dtype
    wide = linear()
    wide.load_state_dict(head.state_dict())
    plain_loss(wide, leaf.detach().double(), labels)[0].backward()
    error = (head.weight.grad.double() - wide.weight.grad).norm() / wide.weight.grad.norm()
    assert error < 4 * torch.finfo(dtype).eps


def test_half_precision_is_added_up_in_float32():
    """Sums over many small chunks are as exact as one product."""
    torch.manual_seed(0)
    head = nn.Linear(64, 16, bias=False)
    hidden = torch.randn(8, 256, 64)
    labels = torch.randint(0, 16, (8, 256))
    [exact] = torch.autograd.grad(plain_loss(head, hidden, labels)[0], head.weight)
    half = head.to(torch.bfloat16)
    errors = []
    for size in (10**6, 16):
        total, _ = chunked_loss(half, hidden.bfloat16(), labels, size)
        [gradient] = torch.autograd.grad(total, half.weight)
        errors.append(float((gradient.float() - exact).norm() / exact.norm()))
    assert errors[1] < 1.5 * errors[0]


def test_logits_never_exist():
    """The peak memory of forward and backward is less than the size of the logits."""
    head = nn.Linear(16, 4096, bias=False)
    hidden = torch.randn(2, 512, 16, requires_grad=True)
    labels = torch.randint(0, 4096, (2, 512))

    def peak_bytes(size):
        hidden.grad = None
        head.weight.grad = None
        with LiveStorages(known=[hidden, labels, *head.parameters()]) as live:
            chunked_loss(head, hidden, labels, size)[0].backward()
        return live.peak

    logits_bytes = 2 * 512 * 4096 * 4
    assert peak_bytes(64) < logits_bytes / 4
    assert peak_bytes(10**6) > 2 * logits_bytes


class Capped(cases.PlainModel):
    def get_output_embeddings(self):
        return self.head

    def change(self, logits):
        logits = 30 * torch.tanh(logits / 30.0)
        logits *= 0.5
        return logits.to(torch.float64)

    def forward(self, input_ids, side=False):
        return cases.Output(self.change(super().forward(input_ids, side).logits))


class Sliced(Capped):
    def change(self, logits):
        return logits[..., :-1]


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        ("llama", True),
        ("llama", False),
        ("gpt2", True),
        ("capped", True),
        ("gemma2", True),
        ("cohere", False),
        ("granite", False),
    ],
)
def test_the_loss_computes_a_models_head(kind, tied):
    """Heads may be tied, and logits capped or scaled. The model itself does not change."""
    batch = (
        cases.ragged_steps(1, keys=())[0][0] if kind == "capped" else cases.ragged_steps(1)[0][0]
    )
    if kind in ("gemma2", "cohere", "granite"):
        model = family(kind, vocab_size=cases.VOCABULARY, tie_word_embeddings=tied)
        model.config.logits_scaling = 3.0
    elif kind == "capped":
        model = Capped(tied=tied).double()
    else:
        model = cases.build(kind, tied=tied, device="cpu")

    def gradients(total):
        leaves = list(model.parameters())
        return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    plain, weight = causal_lm_loss(default_forward(model, batch), batch)
    output = deferred(default_forward, model)(model, batch)
    total, chunked_weight = ChunkedCausalLMLoss(chunk_tokens=5)(output, batch)
    assert torch.equal(weight, chunked_weight)
    assert_equal([total, *gradients(total)], [plain, *gradients(plain)])
    assert default_forward(model, batch).logits.shape[-1] == cases.VOCABULARY


def test_refusals():
    batch = cases.ragged_steps(1, keys=())[0][0]
    with pytest.raises(ModelError, match="does `__getitem__` to its logits"):
        deferred(default_forward, Sliced(tied=False))(Sliced(tied=False), batch)
    with pytest.raises(ModelError, match="does not name the layer"):
        deferred(default_forward, cases.PlainModel(tied=False))
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": {"loss_chunk_tokens": 8}}
    for loss in (None, per_sample(lambda output, batch: output.logits.sum())):
        with pytest.raises(ConfigError, match=r"only plait\.causal_lm_loss is computed in chunks"):
            plait.initialize(cases.build("llama", tied=False, device="cpu"), config, loss_fn=loss)
    model = cases.build("llama", tied=False, dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match=r"no loss is given"):
        plait.parallelize(model, config)
    # The hook would be given the head's input instead of logits.
    model.get_submodule("lm_head").register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="lm_head has a forward hook"):
        deferred(default_forward, model)(model, {"input_ids": torch.zeros(1, 4, dtype=torch.int64)})
