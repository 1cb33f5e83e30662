"""Gradients of replicated and sharded parameters that come in several parts, from parameters that lie unusually in memory, and after steps
that failed: against one process in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import plait
from plait.errors import InputError, ModelError
from plait.verify.parity import full_tensor_on_cpu
from tests.parity.data_parallel import settings

WORLD = 2
Gradients = dict[str, torch.Tensor | None]


class Block(nn.Module):
    """`shared` is one layer of several blocks."""

    def __init__(self, shared):
        super().__init__()
        self.own, self.shared = nn.Linear(6, 6), shared

    def forward(self, x):
        return x + torch.tanh(self.shared(self.own(x)))


class Checkpointed(nn.Module):
    """Reentrant checkpoints around every block; a head that is frozen, or not; `twice` shares a layer between blocks and the end."""

    def __init__(self, *, frozen, twice):
        super().__init__()
        shared = nn.Linear(6, 6)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(shared if twice else nn.Linear(6, 6)) for _ in range(3))
        self.shared, self.head = shared, nn.Linear(6, 2)
        self.head.requires_grad_(not frozen)
        self.twice = twice

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)  # type: ignore[assignment]
        return self.head(self.shared(x) if self.twice else x)


def plain(*, frozen=False, twice=False):
    torch.manual_seed(3)
    return Checkpointed(frozen=frozen, twice=twice).double()


def data(parts):
    """One tensor a rank and backward."""
    return list(
        torch.randn(
            WORLD * parts, 4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64
        )
    )


def gradients(model):
    return {
        name: None if p.grad is None else full_tensor_on_cpu(p.grad).clone()
        for name, p in model.named_parameters()
    }


def reference(model, pieces, scale):
    for piece in pieces:
        (model(piece).square().mean() * scale).backward()
    return gradients(model)


def same(found, wanted, tolerance=1e-13, *, zero_is_none=False):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        got = found[name]
        if gradient is None or got is None:
            missing = [t for t in (gradient, got) if t is not None]
            assert not missing or (zero_is_none and not missing[0].any()), name
            continue
        torch.testing.assert_close(
            got,
            gradient,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def engine_of(model, stage, more=None, accumulation=1):
    config = settings(WORLD, stage, 1, accumulation)
    config["gradient_clipping"] = 0
    config["parallel"] |= more or {}
    return plait.initialize(model, config, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))


def several_backwards(rank, world, stage, more):
    """Runs in a worker."""
    for frozen, twice, parts in (
        (False, False, 1),
        (True, False, 1),
        (True, True, 1),
        (False, True, 3),
    ):
        if twice and stage:
            continue  # `fully_shard` shares no parameter between units
        pieces = data(parts)
        mine = pieces[rank::world]
        wanted = reference(plain(frozen=frozen, twice=twice), pieces, 1 / world)
        engine = engine_of(plain(frozen=frozen, twice=twice), stage, more)
        for _ in range(2):  # the second step begins with nothing of the first
            for piece in mine:
                engine.backward(engine(piece).square().mean())
            found = gradients(engine.model)
            same(
                found,
                wanted,
                0.02 if "compress_gradients" in more else 1e-13,
                zero_is_none="unused_parameters" in more or stage > 0,
            )
            with torch.no_grad():
                engine.optimizer.param_groups[0]["lr"] = 0.0
            engine.step()
        engine.close()


@pytest.mark.parametrize(
    ("stage", "more"),
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
def test_gradients_that_come_in_parts(pool, stage, more):
    """A1: several `engine.backward` before one `engine.step`, and reentrant checkpoints, whose gradients come from inside of a backward,
    for the same parameter more than once."""
    pool.run(WORLD, several_backwards, stage, more)


def own_loop(rank, world, stage):
    """Runs in a worker."""
    # In buckets of one parameter the shared layer's are sent before its last gradient has come.
    for frozen, twice, parts, mib in (
        (True, False, 1, "auto"),
        (True, True, 1, "auto"),
        (False, True, 3, "auto"),
        (False, True, 1, 1e-5),
    ):
        if twice and stage:
            continue
        pieces = data(parts)
        wanted = reference(plain(frozen=frozen, twice=twice), pieces, 1 / world)
        config = settings(world, stage, 1, 1)
        config["parallel"] |= {"unused_parameters": stage == 0, "bucket_mib": mib}
        for called in (True, False):
            model = plait.parallelize(plain(frozen=frozen, twice=twice), config).model
            for piece in pieces[rank::world]:
                output = (
                    model(piece) if called or stage else model.forward(piece)
                )  # hooks of the root do not see the second
                output.square().mean().backward()
            same(gradients(model), wanted, zero_is_none=stage > 0)


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_that_come_in_parts_in_a_loop_of_ones_own(pool, stage):
    """A1, as DistributedDataParallel adds them up: means over the ranks."""
    pool.run(WORLD, own_loop, stage)


class Unusual(nn.Module):
    """Parameters that are transposed, channels last, with gaps, parts of one storage, empty, and (with `alias`) one storage twice."""

    def __init__(self, *, alias):
        """`alias` is for replicated parameters: sharded, it is refused, and so is an empty parameter."""
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)
        self.first.weight = nn.Parameter(torch.randn(5, 6).t())
        self.gaps = nn.Parameter(torch.randn(6, 12)[:, ::2])
        storage = torch.randn(6 * 6 + 6)
        self.part, self.rest = nn.Parameter(storage[:36].view(6, 6)), nn.Parameter(storage[36:])
        self.empty = nn.Parameter(torch.empty(0, 3), requires_grad=alias)
        if alias:
            self.again = nn.Parameter(self.last.weight.data)

    def forward(self, image):
        x = self.first(self.conv(image).mean((2, 3)))
        x = torch.tanh(x @ self.gaps) @ self.part + self.rest + self.empty.sum()
        return self.last(x) + (F.linear(x, self.again) if hasattr(self, "again") else 0)


def unusual(*, alias):
    torch.manual_seed(11)
    torch.set_default_dtype(torch.float64)
    try:
        return Unusual(alias=alias)
    finally:
        torch.set_default_dtype(torch.float32)


def images(steps):
    """[steps, ranks, samples, 3, 5, 5]."""
    return torch.randn(
        steps, WORLD, 2, 3, 5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )


def lying_unusually(rank, world, stage, more):
    """Runs in a worker. A caller's own fused kernel goes through memory without a look at strides: it is torch's
    where gradients lie as torch lays them."""
    for kind, alias in (
        ("SGD", stage == 0),
        ("AdamW", False),
        *((("fused", False),) if stage == 0 else ()),
    ):
        one = unusual(alias=alias)
        own: Callable[..., torch.optim.Optimizer] | None = None
        if kind == "fused":
            own = lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, fused=True)  # noqa: E731
        if kind in ("SGD", "fused"):
            update: torch.optim.Optimizer = torch.optim.SGD(
                one.parameters(), lr=0.1, momentum=0.9, fused=kind == "fused"
            )
            params: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        else:
            update = torch.optim.AdamW(one.parameters(), lr=0.01, weight_decay=0.0, foreach=False)
            params = {"lr": 0.01}
        config = settings(
            world, stage, 1, 1, **({} if own else {"optimizer": {"type": kind, "params": params}})
        )
        config = {**config, "gradient_clipping": 0, "parallel": {**config["parallel"], **more}}
        if own:
            config.pop("optimizer", None)
        engine = plait.initialize(unusual(alias=alias), config, optimizer=own)
        for step in images(3):
            for part in step:
                (one(part).square().mean() / world).backward()
            update.step()
            update.zero_grad()
            engine.backward(engine(step[rank]).square().mean())
            engine.step()
        found = {name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}
        same(found, {name: p.detach() for name, p in one.named_parameters()}, 1e-11)  # type: ignore[arg-type]
        engine.close()


@pytest.mark.parametrize(
    ("stage", "more"), [(0, {}), (0, {"transport": "torch"}), (1, {}), (3, {})], ids=str
)
def test_parameters_that_lie_unusually_in_memory(pool, stage, more):
    """A2: the gradient, the optimizer's fused kernel and the shards see the same elements."""
    pool.run(WORLD, lying_unusually, stage, more)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(Block(nn.Linear(6, 6)) for _ in range(3))

    def forward(self, x, fails=""):
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if fails == "forward" and index == 1:
                raise ArithmeticError("planted")
            if fails == "backward" and index == 1:
                x.register_hook(_fail)
        return self.last(x)


def _fail(_):
    raise ArithmeticError("planted")


def deep():
    torch.manual_seed(3)
    return Deep().double()


def trained_alone(steps, parts=1):
    """One process, plain torch: parameters after steps of SGD."""
    one = deep()
    update = torch.optim.SGD(one.parameters(), lr=0.1)
    for step in range(steps):
        for piece in data(parts * steps)[step * WORLD * parts : (step + 1) * WORLD * parts]:
            (one(piece).square().mean() / WORLD / parts).backward()
        update.step()
        update.zero_grad()
    return {name: p.detach() for name, p in one.named_parameters()}


def looks_between(rank, world, stage, more):
    """Runs in a worker."""
    wanted = trained_alone(3)
    engine = engine_of(deep(), stage, more)
    for piece in data(3)[rank::world]:
        engine.backward(engine(piece).square().mean())
        with torch.no_grad():
            engine(piece)
        engine.step()
    same({name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}, wanted)
    engine.close()
    config = settings(world, stage, 1, 1) | {"gradient_clipping": 0}
    config["parallel"] |= more
    model = plait.parallelize(deep(), config).model
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, piece in enumerate(data(3)[rank::world]):
        model(piece).square().mean().backward()
        with torch.set_grad_enabled(index == 1):
            model(piece)
        update.step()
        update.zero_grad()
    same({name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}, wanted)


@pytest.mark.parametrize("transport", ["torch", "shared-memory"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_before_the_update_leaves_no_old_values(pool, stage, transport):
    """A12."""
    pool.run(WORLD, looks_between, stage, {"transport": transport})


def fails(run):
    with pytest.raises(ArithmeticError, match="planted"):
        run()


def after_failures(rank, world, stage, more):
    """Runs in a worker: whole steps that fail in a forward, in a backward and in the loss, then three calls that do."""
    wanted = trained_alone(3, 2)
    pieces = [data(6)[step * 4 : step * 4 + 4][rank::world] for step in range(3)]
    config = settings(world, stage, 1, 2) | {"gradient_clipping": 0}
    config["parallel"] |= more
    failing = ""

    def forward(model, piece):
        return model(piece, failing)

    def loss(output, piece):
        if failing == "loss":
            raise ArithmeticError("planted")
        return output.square().mean(), 1.0

    def engine_here():
        return plait.initialize(
            deep(),
            config,
            loss_fn=plait.WeightedLoss(loss, lambda _: 1.0),
            forward=forward,
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        )

    engine = engine_here()
    for step, failing in zip(pieces, ("forward", "backward", "loss"), strict=True):
        calls = 0

        def sometimes(model, piece, how=failing):
            nonlocal calls
            calls += 1
            return model(piece, how if calls == 2 else "")

        engine.sharded.forward = sometimes if failing != "loss" else forward
        fails(lambda step=step: engine.train_batch(iter(step)))  # type: ignore[misc]
        failing, engine.sharded.forward = "", forward
        engine.train_batch(iter(step))
    same({name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}, wanted)
    assert engine.global_steps == 3
    engine.close()

    engine = engine_here()
    for step, kind in zip(pieces, ("forward", "backward", "dropped"), strict=True):
        for again in (kind, ""):
            if kind == "forward" and not again:
                step = step[1:]  # a forward that fails takes nothing from the micro-batches before
            for index, piece in enumerate(step):
                output = None
                if again == "forward" and index == 1:
                    fails(lambda piece=piece: engine(piece, "forward"))  # type: ignore[misc]
                    break
                output = (
                    engine(piece, "backward" if again == "backward" and index == 1 else "")
                    .square()
                    .mean()
                )
                if again == "backward" and index == 1:
                    fails(lambda output=output: engine.backward(output))  # type: ignore[misc]
                    break
                engine.backward(output)
                if again == "dropped" and index == 0:
                    engine.zero_grad()
                    engine.backward(engine(piece).square().mean())
                if again == "dropped" and index == 1:
                    zero_grad_within_a_step(engine)
                    assert all(p.grad is None for p in engine.model.parameters())
                    for other in step[:-1]:
                        engine.backward(engine(other).square().mean())
                        engine.step()
                    engine.backward(engine(step[-1]).square().mean())
                engine.step()
            if kind == "dropped":
                break
    same({name: full_tensor_on_cpu(p) for name, p in engine.model.named_parameters()}, wanted)
    assert engine.global_steps == 3
    engine.close()


def zero_grad_within_a_step(engine):
    """`engine.zero_grad()` after the first micro-batch of two: the step begins again, as the first rank warns."""
    if engine.rank:
        engine.zero_grad()
        return
    with pytest.warns(UserWarning, match="drops 1 of the 2 micro-batches of a step, which begins"):
        engine.zero_grad()


@pytest.mark.parametrize(
    ("stage", "more"),
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
def test_a_failed_step_leaves_nothing_behind(pool, stage, more):
    """A14: all ranks raised, the user caught it and went on; and `engine.zero_grad` drops what a step has so far."""
    pool.run(WORLD, after_failures, stage, more)


def given_twice(rank, world):
    """Runs in a worker."""
    wanted = trained_alone(3)
    model, engines = deep(), []
    config = settings(world, 0, 1, 1) | {"gradient_clipping": 0}
    plait.parallelize(model, config)
    for piece in data(3)[rank::world]:
        engine = plait.initialize(model, config, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
        engines.append(engine)
        engine.backward(engine(piece).square().mean())
        engine.step()
        if len(engines) == 2:
            engine.close()
    same({name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}, wanted)
    for former in engines[:2]:
        with pytest.raises(InputError, match="was closed, or its model was passed to another"):
            former(data(1)[rank])
    plait.parallelize(model, config)
    copy.deepcopy(model)(data(1)[rank]).sum().backward()
    model(data(1)[rank]).square().mean().backward()
    again = deep()
    again.load_state_dict(model.state_dict())
    same(gradients(model), reference(again, data(1), 1 / world))
    sharded = engine_of(deep(), 2)
    with pytest.raises(ModelError, match=r"already sharded by Plait \(ZeRO stage 2"):
        plait.initialize(sharded.model, config)


def test_a_model_is_given_twice(pool):
    """A11: whoever got a replicated model last trains it, alone."""
    pool.run(WORLD, given_twice)


def refused(rank, world):
    """Runs in a worker."""
    piece = data(1)[rank]
    config = settings(world, 1, 1, 2) | {"gradient_clipping": 0}
    model = deep()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = plait.parallelize(model, config)
    model(piece).square().mean().backward()
    with pytest.raises(InputError, match="was built before plait.parallelize"):
        early.step()
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    update.step()
    update.zero_grad()
    with sharded.accumulate():
        model(piece).square().mean().backward()
    with pytest.raises(InputError, match=r"backwards inside accumulate\(\) only"):
        update.step()
    for stage in (0, 1):
        engine = engine_of(deep(), stage)
        with pytest.raises(InputError, match=r"loss.backward\(\)"):
            engine(piece).square().mean().backward()
        for loss, words in (
            (None, "not NoneType"),
            (torch.ones(3), "shape"),
            (torch.ones(()), "without a gradient"),
        ):
            with pytest.raises(InputError, match=words):
                engine.backward(loss)  # type: ignore[arg-type]
        engine.zero_grad()
        frozen = deep()
        frozen.last.requires_grad_(False)
        engine = engine_of(frozen, stage)
        engine.model.get_submodule("last").requires_grad_(True)
        engine.backward(engine(piece).square().mean())
        with pytest.raises(InputError, match="was frozen when plait.initialize"):
            engine.step()
    engine = engine_of(deep(), 1, accumulation=2)
    engine.backward(engine(piece).square().mean())
    engine.set_gradient_accumulation_boundary(
        True
    )  # too late: the backward left its gradients for the next one to reduce
    with pytest.raises(InputError, match="before the forward and backward of the last micro-batch"):
        engine.step()
    for stage in (1, 3):
        engine = engine_of(deep(), stage)
        weight: Any = engine.model.get_parameter("blocks.0.own.weight")
        penalty = weight.full_tensor().square().sum()
        with pytest.raises(InputError, match=r"blocks.0.*is read by the loss itself"):
            engine.backward(engine(piece).square().mean() + penalty)
    total = plait.per_sample(lambda output, _: output.sum())
    engine = plait.initialize(
        deep(), config, loss_fn=total, forward=lambda whole, x: whole.blocks[0].own(x)
    )
    with pytest.raises(
        InputError, match="let forward= call the model and not the modules inside it"
    ):
        engine.train_batch(iter([piece, piece]))
    replicated = settings(world, 0, 1, 1)
    sparse = nn.Sequential(nn.Embedding(4, 3, sparse=True))
    expanded = nn.Linear(2, 2)
    expanded.weight = nn.Parameter(torch.zeros(1, 2).expand(2, 2))
    for wrong, words in ((sparse, "sparse gradients"), (expanded, "expanded tensor")):
        with pytest.raises(ModelError, match=words):
            plait.initialize(wrong, replicated)
    watched = deep()
    watched.last.weight.register_hook(lambda gradient: gradient)
    for wrong, words in (
        (unusual(alias=True), "no elements|same memory"),
        (nn.Linear(0, 2), "no elements"),
        (watched, "has a hook"),
    ):
        with pytest.raises(ModelError, match=words):
            plait.initialize(wrong, config)


def test_what_would_train_something_else_is_refused(pool):
    """Misuse, B14 and what no layout can train."""
    pool.run(WORLD, refused)
