"""Gradients that arrive in several parts, in unusual memory, and after failed steps.

Each is compared with one process in plain torch.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.errors import InputError
from plait.verify.parity import full_tensor_on_cpu
from tests.parity.data_parallel import settings

WORLD = 2


class Block(nn.Module):
    """A residual block whose second layer may belong to several blocks."""

    def __init__(self, shared):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.shared = shared

    def forward(self, hidden):
        return hidden + torch.tanh(self.shared(self.inner(hidden)))


class Checkpointed(nn.Module):
    """A model with a reentrant checkpoint around every block.

    With `shares` all blocks and the model itself use the same layer.
    """

    def __init__(self, *, frozen_head, shares):
        super().__init__()
        shared = nn.Linear(6, 6)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(shared if shares else nn.Linear(6, 6)) for _ in range(3))
        self.shared = shared
        self.head = nn.Linear(6, 2).requires_grad_(not frozen_head)
        self.shares = shares

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        return self.head(self.shared(hidden) if self.shares else hidden)


def checkpointed(*, frozen_head=False, shares=False):
    torch.manual_seed(3)
    return Checkpointed(frozen_head=frozen_head, shares=shares).double()


def data(count):
    """Inputs of micro-batches. [count, ranks, samples, 6]"""
    shape = (count, WORLD, 4, 6)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def gradients(model):
    tensors = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        tensors[name] = None if gradient is None else full_tensor_on_cpu(gradient).clone()
    return tensors


def weights(model):
    return {name: full_tensor_on_cpu(p.detach()) for name, p in model.named_parameters()}


def reference_gradients(model, micro_batches):
    """Return the sums of all micro-batches' gradients over the ranks' mean."""
    for inputs in micro_batches.flatten(0, 1):
        (model(inputs).square().mean() / WORLD).backward()
    return gradients(model)


def assert_same(actual, expected, tolerance=1e-13, *, zero_is_none=False):
    """Compare gradients or weights by name. With `zero_is_none`, None equals a tensor of zeros."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor is None or actual[name] is None:
            other = actual[name] if tensor is None else tensor
            assert other is None or (zero_is_none and not other.any()), name
            continue
        message = f"{name}: {{}}".format
        torch.testing.assert_close(
            actual[name], tensor, rtol=tolerance, atol=tolerance, msg=message
        )


def config_without_clipping(stage, parallel=None, accumulation=1):
    config = settings(WORLD, stage, 1, accumulation, gradient_clipping=0)
    config["parallel"] |= parallel or {}
    return config


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def engine_of(model, stage, parallel=None, accumulation=1):
    config = config_without_clipping(stage, parallel, accumulation)
    return plait.initialize(model, config, optimizer=sgd)


def backward(engine, inputs):
    engine.backward(engine(inputs).square().mean())


def several_backwards(rank, world, stage, parallel):
    """Call `engine.backward` several times before `engine.step`. Runs on every rank."""
    for frozen_head, shares, count in (
        (False, False, 1),
        (True, False, 1),
        (True, True, 1),
        (False, True, 3),
    ):
        if shares and stage:
            continue  # `fully_shard` shares no parameter between units
        micro_batches = data(count)
        model = checkpointed(frozen_head=frozen_head, shares=shares)
        expected = reference_gradients(copy.deepcopy(model), micro_batches)
        engine = engine_of(model, stage, parallel)
        for _ in range(2):
            # The second step must begin with nothing of the first.
            for inputs in micro_batches[:, rank]:
                backward(engine, inputs)
            assert_same(
                gradients(engine.model),
                expected,
                0.02 if "compress_gradients" in parallel else 1e-13,
                zero_is_none="unused_parameters" in parallel or stage > 0,
            )
            engine.optimizer.param_groups[0]["lr"] = 0.0
            engine.step()
        engine.close()


@pytest.mark.parametrize(
    ("stage", "parallel"),
    [
        (0, {}),
        (0, {"transport": "torch"}),
        (0, {"unused_parameters": False}),
        (0, {"compress_gradients": "int8"}),
        (1, {}),
        (2, {}),
        (3, {}),
    ],
    ids=str,
)
def test_gradients_that_come_in_parts(pool, stage, parallel):
    """Reentrant checkpoints run a backward inside of the backward, with gradients of its own."""
    pool.run(WORLD, several_backwards, stage, parallel)


def several_backwards_in_own_loop(rank, world, stage):
    """Runs on every rank."""
    for frozen_head, shares, count, bucket_mib in (
        (True, False, 1, "auto"),
        (True, True, 1, "auto"),
        (False, True, 3, "auto"),
        # A bucket per parameter: the shared layer's is sent before its last gradient arrives.
        (False, True, 1, 1e-5),
    ):
        if shares and stage:
            continue
        micro_batches = data(count)
        model = checkpointed(frozen_head=frozen_head, shares=shares)
        expected = reference_gradients(copy.deepcopy(model), micro_batches)
        config = settings(world, stage, 1, 1)
        config["parallel"] |= {"unused_parameters": stage == 0, "bucket_mib": bucket_mib}
        # Hooks of the root module do not see a call of `forward`. FSDP needs them.
        for calls_module in (True, False) if stage == 0 else (True,):
            sharded = copy.deepcopy(model)
            plait.parallelize(sharded, config)
            for inputs in micro_batches[:, rank]:
                output = sharded(inputs) if calls_module else sharded.forward(inputs)
                output.square().mean().backward()
            assert_same(gradients(sharded), expected, zero_is_none=stage > 0)


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_in_parts_in_an_own_loop(pool, stage):
    """Each backward adds the mean over the ranks, as with DistributedDataParallel."""
    pool.run(WORLD, several_backwards_in_own_loop, stage)


class UnusualMemory(nn.Module):
    """Parameters that are transposed, channels last, strided, parts of one storage, or empty.

    With `aliased` two parameters are the same memory. Sharding refuses this, and an empty
    parameter that trains.
    """

    def __init__(self, *, aliased):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.first = nn.Linear(5, 6)
        self.last = nn.Linear(6, 4)
        self.first.weight = nn.Parameter(torch.randn(5, 6).t())
        self.strided = nn.Parameter(torch.randn(6, 12)[:, ::2])
        storage = torch.randn(6 * 6 + 6)
        self.matrix = nn.Parameter(storage[:36].view(6, 6))
        self.vector = nn.Parameter(storage[36:])
        self.empty = nn.Parameter(torch.empty(0, 3), requires_grad=aliased)
        if aliased:
            self.alias = nn.Parameter(self.last.weight.data)

    def forward(self, image):
        hidden = self.first(self.conv(image).mean((2, 3)))
        hidden = torch.tanh(hidden @ self.strided) @ self.matrix + self.vector + self.empty.sum()
        output = self.last(hidden)
        if hasattr(self, "alias"):
            output = output + F.linear(hidden, self.alias)
        return output


def unusual_memory(*, aliased):
    torch.manual_seed(11)
    # A conversion by `.double()` would make all parameters contiguous.
    torch.set_default_dtype(torch.float64)
    try:
        return UnusualMemory(aliased=aliased)
    finally:
        torch.set_default_dtype(torch.float32)


def fused_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def train_unusual_memory(rank, world, stage, parallel):
    """Train with SGD, AdamW and a user's fused SGD. Runs on every rank.

    A fused kernel reads memory without its strides, so gradients must have those of torch.
    """
    kinds = [("SGD", stage == 0), ("AdamW", False)]
    if stage == 0:
        kinds.append(("fused", False))
    shape = (3, WORLD, 2, 3, 5, 5)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for kind, aliased in kinds:
        expected = unusual_memory(aliased=aliased)
        config = config_without_clipping(stage, parallel)
        if kind == "AdamW":
            config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
            optimizer = torch.optim.AdamW(
                expected.parameters(), lr=0.01, weight_decay=0.0, foreach=False
            )
        else:
            params = {"lr": 0.1, "momentum": 0.9}
            config["optimizer"] = {"type": "SGD", "params": params}
            optimizer = torch.optim.SGD(expected.parameters(), **params, fused=kind == "fused")
        if kind == "fused":
            del config["optimizer"]
        engine = plait.initialize(
            unusual_memory(aliased=aliased),
            config,
            optimizer=fused_sgd if kind == "fused" else None,
        )
        for step in images:
            for inputs in step:
                (expected(inputs).square().mean() / world).backward()
            optimizer.step()
            optimizer.zero_grad()
            backward(engine, step[rank])
            engine.step()
        assert_same(weights(engine.model), weights(expected), 1e-11)
        engine.close()


@pytest.mark.parametrize(
    ("stage", "parallel"), [(0, {}), (0, {"transport": "torch"}), (1, {}), (3, {})], ids=str
)
def test_parameters_in_unusual_memory(pool, stage, parallel):
    pool.run(WORLD, train_unusual_memory, stage, parallel)


def raise_planted(*_):
    raise ArithmeticError("planted")


class Deep(nn.Module):
    """A model whose forward or backward fails on request."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 2)
        self.blocks = nn.ModuleList(Block(nn.Linear(6, 6)) for _ in range(3))

    def forward(self, inputs, failure=""):
        hidden = self.first(inputs)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if failure == "forward" and index == 1:
                raise_planted()
            if failure == "backward" and index == 1:
                hidden.register_hook(raise_planted)
        return self.last(hidden)


def deep():
    torch.manual_seed(3)
    return Deep().double()


def reference_weights(steps, accumulation=1):
    """Train in one process and return the weights."""
    model = deep()
    optimizer = sgd(model.parameters())
    for step in data(steps * accumulation).view(steps, accumulation * WORLD, 4, 6):
        for inputs in step:
            (model(inputs).square().mean() / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def forward_before_update(rank, world, stage, parallel):
    """Call the model between backward and step. Runs on every rank."""
    expected = reference_weights(3)
    engine = engine_of(deep(), stage, parallel)
    for inputs in data(3)[:, rank]:
        backward(engine, inputs)
        with torch.no_grad():
            engine(inputs)
        engine.step()
    assert_same(weights(engine.model), expected)
    engine.close()

    model = deep()
    plait.parallelize(model, config_without_clipping(stage, parallel))
    optimizer = sgd(model.parameters())
    for index, inputs in enumerate(data(3)[:, rank]):
        model(inputs).square().mean().backward()
        with torch.set_grad_enabled(index == 1):
            model(inputs)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(weights(model), expected)


@pytest.mark.parametrize("transport", ["torch", "shared-memory"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_before_the_update_leaves_no_old_values(pool, stage, transport):
    """The weights that this forward gathers are not those of the next step."""
    pool.run(WORLD, forward_before_update, stage, {"transport": transport})


def assert_planted_failure(call):
    with pytest.raises(ArithmeticError, match="planted"):
        call()


def train_after_failed_steps(rank, stage, parallel):
    """Call `train_batch` for steps that fail, and again for the same steps."""
    failure = ""
    forwards = 0

    def forward(model, inputs):
        nonlocal forwards
        forwards += 1
        # The second micro-batch fails, when the first has left gradients.
        return model(inputs, failure if forwards == 2 else "")

    def loss_fn(output, inputs):
        if failure == "loss":
            raise_planted()
        return output.square().mean(), 1.0

    engine = plait.initialize(
        deep(),
        config_without_clipping(stage, parallel, accumulation=2),
        loss_fn=plait.WeightedLoss(loss_fn, lambda inputs: 1.0),
        forward=forward,
        optimizer=sgd,
    )
    steps = data(6).unflatten(0, (3, 2))[:, :, rank]
    for step, failing_part in zip(steps, ("forward", "backward", "loss"), strict=True):
        failure = failing_part
        forwards = 0
        assert_planted_failure(lambda step=step: engine.train_batch(iter(step)))
        failure = ""
        engine.train_batch(iter(step))
    assert_same(weights(engine.model), reference_weights(3, accumulation=2))
    assert engine.global_steps == 3
    engine.close()


def train_after_failed_calls(rank, stage, parallel):
    """Fail in a forward, fail in a backward, and drop a micro-batch with `zero_grad`."""
    engine = engine_of(deep(), stage, parallel, accumulation=2)
    steps = data(6).unflatten(0, (3, 2))[:, :, rank]

    def train(*micro_batches):
        for inputs in micro_batches:
            backward(engine, inputs)
            engine.step()

    # A failed forward takes nothing from the micro-batches before it.
    first, second = steps[0]
    train(first)
    assert_planted_failure(lambda: engine(second, "forward"))
    train(second)

    # A failed backward drops the gradients of the step.
    first, second = steps[1]
    train(first)
    loss = engine(second, "backward").square().mean()
    assert_planted_failure(lambda: engine.backward(loss))
    train(first, second)

    first, second = steps[2]
    backward(engine, first)
    engine.zero_grad()
    train(first)
    backward(engine, second)
    if rank:
        engine.zero_grad()
    else:
        message = "drops 1 of the 2 micro-batches of a step, which begins"
        with pytest.warns(UserWarning, match=message):
            engine.zero_grad()
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    train(first, second)

    assert_same(weights(engine.model), reference_weights(3, accumulation=2))
    assert engine.global_steps == 3
    engine.close()


def train_after_failures(rank, world, stage, parallel):
    """Runs on every rank."""
    train_after_failed_steps(rank, stage, parallel)
    train_after_failed_calls(rank, stage, parallel)


@pytest.mark.parametrize(
    ("stage", "parallel"),
    [
        (0, {}),
        (0, {"transport": "torch"}),
        (1, {}),
        (2, {"transport": "torch"}),
        (3, {}),
        (3, {"transport": "torch"}),
    ],
    ids=str,
)
def test_a_failed_step_leaves_nothing_behind(pool, stage, parallel):
    pool.run(WORLD, train_after_failures, stage, parallel)


def pass_a_model_twice(rank, world):
    """Runs on every rank."""
    model = deep()
    config = config_without_clipping(0)
    plait.parallelize(model, config)
    engines = []
    for inputs in data(3)[:, rank]:
        engine = plait.initialize(model, config, optimizer=sgd)
        engines.append(engine)
        backward(engine, inputs)
        engine.step()
        if len(engines) == 2:
            # An engine may be closed, or not, before its model is passed on.
            engine.close()
    assert_same(weights(model), reference_weights(3))
    inputs = data(1)[0, rank]
    for engine in engines[:2]:
        with pytest.raises(InputError, match="was closed, or its model was passed to another"):
            engine(inputs)

    plait.parallelize(model, config)
    # A copy of a model is not parallelized, and its hooks must not act on the original.
    copy.deepcopy(model)(inputs).sum().backward()
    model(inputs).square().mean().backward()
    unsharded = deep()
    unsharded.load_state_dict(model.state_dict())
    assert_same(gradients(model), reference_gradients(unsharded, data(1)))


def test_a_model_is_passed_twice(pool):
    """The last owner of a replicated model trains it, and no other."""
    pool.run(WORLD, pass_a_model_twice)


def misuse_own_loop(rank, world):
    """Runs on every rank."""
    inputs = data(1)[0, rank]
    model = deep()
    early = sgd(model.parameters())
    sharded = plait.parallelize(model, config_without_clipping(1, accumulation=2))
    model(inputs).square().mean().backward()
    with pytest.raises(InputError, match="was built before plait.parallelize"):
        early.step()

    optimizer = sgd(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    with sharded.accumulate():
        model(inputs).square().mean().backward()
    with pytest.raises(InputError, match=r"backwards inside accumulate\(\) only"):
        optimizer.step()


def misuse_engine(rank, world):
    """Runs on every rank."""
    inputs = data(1)[0, rank]
    for stage in (0, 1):
        engine = engine_of(deep(), stage)
        with pytest.raises(InputError, match=r"loss.backward\(\)"):
            engine(inputs).square().mean().backward()
        for loss, message in (
            (None, "not NoneType"),
            (torch.ones(3), "shape"),
            (torch.ones(()), "without a gradient"),
        ):
            with pytest.raises(InputError, match=message):
                engine.backward(loss)
        engine.zero_grad()

        partly_frozen = deep()
        partly_frozen.last.requires_grad_(False)
        engine = engine_of(partly_frozen, stage)
        engine.model.last.requires_grad_(True)
        backward(engine, inputs)
        with pytest.raises(InputError, match="was frozen when plait.initialize"):
            engine.step()

    engine = engine_of(deep(), 1, accumulation=2)
    backward(engine, inputs)
    # Too late: the backward has left its gradients for the next one to reduce.
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(InputError, match="before the forward and backward of the last micro-batch"):
        engine.step()

    for stage in (1, 3):
        engine = engine_of(deep(), stage)
        weight = engine.model.blocks[0].inner.weight
        penalty = weight.full_tensor().square().sum()
        with pytest.raises(InputError, match=r"blocks.0.*is read by the loss itself"):
            engine.backward(engine(inputs).square().mean() + penalty)

    engine = plait.initialize(
        deep(),
        config_without_clipping(1, accumulation=2),
        loss_fn=plait.per_sample(lambda output, _: output.sum()),
        forward=lambda model, batch: model.blocks[0].inner(batch),
    )
    message = "let forward= call the model and not the modules inside it"
    with pytest.raises(InputError, match=message):
        engine.train_batch(iter([inputs, inputs]))


@pytest.mark.parametrize("misuse", [misuse_own_loop, misuse_engine])
def test_what_would_train_something_else_is_refused(pool, misuse):
    pool.run(WORLD, misuse)
