"""Cross entropy in pieces: value and gradients of the plain one, in less memory."""

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

WIDTH, VOCABULARY = 12, 31


def data(*, seed=0, ragged=True):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 7, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, VOCABULARY, (3, 7), generator=generator)
    if ragged:
        labels[0, 3:], labels[2] = -100, -100
    return hidden, labels


def both(head, hidden, labels, size):
    """[loss, weight, gradients ...] of the plain loss and of the one in pieces."""
    found = []
    for pieces in (False, True):
        leaf = hidden.clone().requires_grad_()
        if pieces:
            total, weight = plait.chunked_causal_lm_loss(leaf, head, labels, chunk_tokens=size)
        else:
            total, weight = causal_lm_loss(cases.Output(head(leaf)), {"labels": labels})
        found.append(
            [
                total,
                weight,
                *torch.autograd.grad(
                    total * 0.37, [leaf, *(p for p in head.parameters() if p.requires_grad)]
                ),
            ]
        )
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_loss(bias):
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=torch.float64)
    for ragged in (False, True):
        for size in (1, 5, 7, 21, 1000):
            plain, pieces = both(head, *data(ragged=ragged), size)
            torch.testing.assert_close(plain, pieces, rtol=1e-12, atol=1e-12)


def test_no_target_at_all():
    head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    hidden, labels = data()
    _, pieces = both(head, hidden, torch.full_like(labels, -100), 4)
    assert all(not part.any() for part in pieces)


def test_frozen_heads_and_frozen_models():
    head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64).requires_grad_(False)
    plain, pieces = both(head, *data(), 4)
    torch.testing.assert_close(plain[2], pieces[2], rtol=1e-12, atol=1e-12)
    hidden, labels = data()
    head.requires_grad_(True)
    total, _ = plait.chunked_causal_lm_loss(hidden, head, labels, chunk_tokens=4)
    wanted, _ = causal_lm_loss(cases.Output(head(hidden)), {"labels": labels})
    torch.testing.assert_close(
        torch.autograd.grad(total, head.weight),
        torch.autograd.grad(wanted, head.weight),
        rtol=1e-12,
        atol=1e-12,
    )


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_products_of_the_head():
    """The forward has all of them: logits, gradients of the hidden states and of the weight. Without gradients, the logits alone."""
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.float64)
    hidden, labels = data()
    hidden.requires_grad_()
    counts = []
    for trained in (True, False):
        head.requires_grad_(trained)
        with Products() as forward:
            total, _ = plait.chunked_causal_lm_loss(hidden, head, labels, chunk_tokens=7)
        with Products() as backward:
            total.backward()
        counts.append((forward.count, backward.count))
    with Products() as evaluation, torch.no_grad():
        total, _ = plait.chunked_causal_lm_loss(hidden, head, labels, chunk_tokens=7)
    assert not total.requires_grad
    assert [*counts, evaluation.count] == [(9, 0), (6, 0), 3]


def test_a_graph_that_is_used_twice():
    head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    hidden, labels = data()
    hidden.requires_grad_()
    leaves = [hidden, *head.parameters()]
    total, _ = plait.chunked_causal_lm_loss(hidden, head, labels, chunk_tokens=4)
    wanted, _ = causal_lm_loss(cases.Output(head(hidden)), {"labels": labels})
    for factor, keep in ((0.25, True), (3.0, True), (2.0, False)):
        found = torch.autograd.grad(
            total, leaves, torch.tensor(factor, dtype=torch.float64), retain_graph=keep
        )
        expected = torch.autograd.grad(wanted * factor, leaves, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_part_that_is_recomputed(reentrant):
    head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    hidden, labels = data()
    found = []
    for recomputed in (True, False):
        leaf = hidden.clone().requires_grad_()

        def total(states):
            return plait.chunked_causal_lm_loss(states.tanh(), head, labels, chunk_tokens=4)[0]

        loss = checkpoint(total, leaf, use_reentrant=reentrant) if recomputed else total(leaf)
        (loss * 0.3).backward()
        found.append([loss.detach(), leaf.grad, *(p.grad for p in head.parameters())])
        head.zero_grad()
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_head_with_adapters():
    """A frozen matrix, a product of two small ones, and a bias."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
            self.base.weight.requires_grad_(False)
            self.down = nn.Linear(WIDTH, 3, bias=False, dtype=torch.float64)
            self.up = nn.Linear(3, VOCABULARY, bias=False, dtype=torch.float64)

        def forward(self, hidden):
            return self.base(hidden) + self.up(self.down(hidden))

    plain, pieces = both(Adapted(), *data(), 4)
    assert len(pieces) == 2 + 1 + 3
    torch.testing.assert_close(plain, pieces, rtol=1e-12, atol=1e-12)


class SumOfWeights(nn.Module):
    """A head whose two matrices have the same gradient, beside parameters with an expanded one and with none."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=torch.float64)) for _ in range(2)
        )
        self.shift, self.idle = (
            nn.Parameter(torch.ones(VOCABULARY, dtype=torch.float64)) for _ in range(2)
        )
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, hidden):
        return F.linear(hidden, self.first + self.second) * self.gain.sum() + self.shift


@pytest.mark.parametrize("size", [4, 1000])
def test_parameters_with_one_gradient_and_without(size):
    """Sums of chunks are made in place, so parameters whose gradients share memory have sums of their own."""
    head = SumOfWeights()
    hidden, labels = data()
    found = []
    for chunked in (False, True):
        head.zero_grad()
        total, _ = causal_lm_loss(cases.Output(head(hidden)), {"labels": labels})
        if chunked:
            total, _ = plait.chunked_causal_lm_loss(hidden, head, labels, chunk_tokens=size)
        (total * 0.37).backward()
        assert head.idle.grad is None
        found.append([p.grad for p in (head.first, head.second, head.shift, head.gain)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [16, 1000])
def test_float16_gradients_are_made_with_the_loss_scale(size):
    """Sums that overflow in float16, and probabilities that vanish, unless the loss is scaled first."""
    for kind, value, factor in (("overflows", 2000.0, 1 / 128), ("vanishes", 1e-4, 4096.0)):
        head = nn.Linear(WIDTH, 2, bias=False)
        with torch.no_grad():
            head.weight.copy_(
                torch.tensor([[0.0] * WIDTH, [1e-4 if kind == "overflows" else 1.0] * WIDTH])
            )
        hidden = torch.full((2, 64, WIDTH), value).half().requires_grad_()
        labels = torch.zeros(2, 64, dtype=torch.int64)
        head = head.half()
        total, _ = plait.chunked_causal_lm_loss(hidden, head, labels, chunk_tokens=size)
        found = torch.autograd.grad(total * factor, [hidden, head.weight])
        wide = nn.Linear(WIDTH, 2, bias=False, dtype=torch.float64)
        wide.load_state_dict(head.state_dict())
        leaf = hidden.detach().double().requires_grad_()
        exact, _ = causal_lm_loss(cases.Output(wide(leaf)), {"labels": labels})
        expected = torch.autograd.grad(exact * factor, [leaf, wide.weight])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=4e-3, atol=0)


def test_float16_autocast_is_entered_again_by_the_backward():
    head = nn.Linear(WIDTH, VOCABULARY)
    hidden, labels = data()
    found = []
    for chunked in (False, True):
        leaf = hidden.float().requires_grad_()
        with torch.autocast("cpu", torch.float16):
            total, _ = causal_lm_loss(cases.Output(head(leaf)), {"labels": labels})
            if chunked:
                total, _ = plait.chunked_causal_lm_loss(leaf, head, labels, chunk_tokens=4)
        found.append(torch.autograd.grad(total * 8, [leaf, *head.parameters()]))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def test_gradients_that_would_be_lost_or_changed_twice():
    """A hook would be called for every chunk, and nobody looks for the gradients of other layers' weights."""
    hidden, labels = data()
    hooked = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    hooked.weight.register_hook(lambda gradient: gradient * 0.5)
    with pytest.raises(ModelError, match="has a hook on its gradient"):
        plait.chunked_causal_lm_loss(hidden, hooked, labels, chunk_tokens=4)

    embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)

    class Transposed(nn.Module):
        def forward(self, hidden):
            return F.linear(hidden, embedding.weight)

    with pytest.raises(ModelError, match="none of the head's own parameters"):
        plait.chunked_causal_lm_loss(hidden.requires_grad_(), Transposed(), labels, chunk_tokens=4)
    embedding.requires_grad_(False)
    plait.chunked_causal_lm_loss(hidden, Transposed(), labels, chunk_tokens=4)


@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_compiled():
    """In a function of the user that torch.compile traces."""
    head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    hidden, labels = data()

    def total(states):
        return plait.chunked_causal_lm_loss(states.tanh(), head, labels, chunk_tokens=4)[0] * 0.5

    leaves = [hidden.requires_grad_(), *head.parameters()]
    found = [
        torch.autograd.grad(run(hidden), leaves)
        for run in (torch.compile(total, backend="aot_eager"), total)
    ]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_split_backward():
    """As in zero-bubble pipelines: the gradient of the input first, those of weights later."""
    head, first = (nn.Linear(WIDTH, width, dtype=torch.float64) for width in (VOCABULARY, WIDTH))
    hidden, labels = data()
    received = hidden.requires_grad_()
    weights = [*first.parameters(), *head.parameters()]
    wanted, _ = causal_lm_loss(cases.Output(head(first(received))), {"labels": labels})
    expected = torch.autograd.grad(wanted * 0.5, [received, *weights])
    total, _ = plait.chunked_causal_lm_loss(first(received), head, labels, chunk_tokens=4)
    with Products() as products:
        deferred_half = backward_inputs([total * 0.5], None, [received])
    assert received.grad is not None and all(weight.grad is None for weight in weights)
    assert products.count == 1  # of the first layer
    backward_weights(deferred_half)
    torch.testing.assert_close(
        [received.grad, *(weight.grad for weight in weights)],
        list(expected),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_gradients_have_the_parameters_dtype(kind):
    dtype = getattr(torch, kind)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    hidden, labels = data()
    leaf = hidden.to(dtype).requires_grad_()
    total, _ = plait.chunked_causal_lm_loss(leaf, head, labels, chunk_tokens=4)
    total.backward()
    assert {
        tensor.grad.dtype for tensor in (leaf, head.weight, head.bias) if tensor.grad is not None
    } == {dtype}
    wide = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    wide.load_state_dict(head.state_dict())
    wanted, _ = causal_lm_loss(cases.Output(wide(leaf.detach().double())), {"labels": labels})
    wanted.backward()
    assert head.weight.grad is not None and wide.weight.grad is not None
    error = (head.weight.grad.double() - wide.weight.grad).norm() / wide.weight.grad.norm()
    assert error < 4 * torch.finfo(dtype).eps


def test_halves_are_added_up_in_float32():
    """Many small pieces lose no more digits than one product."""
    torch.manual_seed(0)
    head = nn.Linear(64, 16, bias=False)
    hidden, labels = torch.randn(8, 256, 64), torch.randint(0, 16, (8, 256))
    exact = torch.autograd.grad(
        causal_lm_loss(cases.Output(head(hidden)), {"labels": labels})[0], head.weight
    )[0]
    half = head.to(torch.bfloat16)
    errors = []
    for size in (10**6, 16):
        total, _ = plait.chunked_causal_lm_loss(hidden.bfloat16(), half, labels, chunk_tokens=size)
        errors.append(
            float(
                (torch.autograd.grad(total, half.weight)[0].float() - exact).norm() / exact.norm()
            )
        )
    assert errors[1] < 1.5 * errors[0]


def test_logits_never_exist():
    """The most that forward and backward hold, against the logits' size."""
    head = nn.Linear(16, 4096, bias=False)
    hidden, labels = torch.randn(2, 512, 16, requires_grad=True), torch.randint(0, 4096, (2, 512))
    peaks = []
    for size in (64, 10**6):
        with LiveStorages(known=[hidden, labels, *head.parameters()]) as live:
            total, _ = plait.chunked_causal_lm_loss(hidden, head, labels, chunk_tokens=size)
            total.backward()
        hidden.grad = head.weight.grad = None
        peaks.append(live.peak)
    logits = 2 * 512 * 4096 * 4
    assert peaks[1] > 2 * logits
    assert peaks[0] < logits / 4


class Capped(cases.PlainModel):
    def get_output_embeddings(self):
        return self.head

    def change(self, logits):
        logits = 30 * torch.tanh(logits / 30.0)
        logits *= 0.5
        return logits.to(torch.float64)

    def forward(self, input_ids, side=False):
        return cases.Output(self.change(super().forward(input_ids, side).logits))


class Cut(Capped):
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
def test_a_models_head_is_left_to_the_loss(kind, tied):
    """Also one that is tied to the embedding, and logits that are capped or scaled afterwards (B8); the model is as it was afterwards."""
    if kind in ("gemma2", "cohere", "granite"):
        model = family(kind, vocab_size=cases.VOCABULARY, tie_word_embeddings=tied)
        model.config.logits_scaling = 3.0
    else:
        model = (
            Capped(tied=tied).double()
            if kind == "capped"
            else cases.build(kind, tied=tied, device="cpu")
        )
    batch = (cases.ragged_steps(1, keys=()) if kind == "capped" else cases.ragged_steps(1))[0][0]
    wanted, weight = causal_lm_loss(default_forward(model, batch), batch)
    gradients = torch.autograd.grad(
        wanted, list(model.parameters()), allow_unused=True, materialize_grads=True
    )
    loss = ChunkedCausalLMLoss(chunk_tokens=5)
    total, found_weight = loss(deferred(default_forward, model)(model, batch), batch)
    torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(weight, found_weight)
    found = torch.autograd.grad(
        total, list(model.parameters()), allow_unused=True, materialize_grads=True
    )
    for a, b in zip(gradients, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert default_forward(model, batch).logits.shape[-1] == cases.VOCABULARY


def test_refusals():
    batch = cases.ragged_steps(1, keys=())[0][0]
    with pytest.raises(ModelError, match="does `__getitem__` to its logits"):
        deferred(default_forward, Cut(tied=False))(Cut(tied=False), batch)
    with pytest.raises(ModelError, match="does not name the layer"):
        deferred(default_forward, cases.PlainModel(tied=False))
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": {"loss_chunk_tokens": 8}}
    for loss in (None, per_sample(lambda output, batch: output.logits.sum())):
        with pytest.raises(ConfigError, match=r"only plait\.causal_lm_loss is computed in chunks"):
            plait.initialize(cases.build("llama", tied=False, device="cpu"), config, loss_fn=loss)
    model = cases.build("llama", tied=False, dtype=torch.float32, device="cpu")
    with pytest.raises(ConfigError, match=r"no loss is given"):
        plait.parallelize(model, config)
    # A17: the hook would be given the head's input in place of logits.
    model.get_submodule("lm_head").register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="lm_head has a forward hook"):
        deferred(default_forward, model)(model, {"input_ids": torch.zeros(1, 4, dtype=torch.int64)})
