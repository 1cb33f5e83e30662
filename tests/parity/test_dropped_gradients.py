"""`zero_grad` between the micro-batches of a step drops gradients that are not reduced yet, as in one process."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

import plait
from plait.verify.parity import full_tensor_on_cpu
from tests.parity import cases
from tests.parity.data_parallel import materialised, settings
from tests.parity.mean_losses import close, mean_loss

FULL_STEP = ["inside", "last", "step"]

PROGRAMS = {
    "accumulates": ["inside side", *FULL_STEP, "inside", "last side", "step"],
    "gives up": ["inside side", "zero", *FULL_STEP, "last side", "step"],
    "gives up twice": ["inside", "inside side", "zero", "inside", "zero", *FULL_STEP],
    "zeroes in place": ["inside side", "zero in place", *FULL_STEP, "last side", "step"],
    "zeroes inside": ["inside side then zero", *FULL_STEP],
    "model.zero_grad": ["inside side", "model.zero_grad", *FULL_STEP],
    "model.zero_grad in place": ["inside side", "model.zero_grad in place", *FULL_STEP],
    "one block's zero_grad": ["inside side", "block.zero_grad", *FULL_STEP],
    "between forward and backward": ["inside side", "last after zero", "step"],
    "after a forward": ["last side", "last after zero", "step"],
    "steps after zero": ["inside", "zero", "step", *FULL_STEP],
    "after a reduced backward": ["last side", "inside", "zero", *FULL_STEP],
    "in place after a reduced backward": ["last", "inside side", "zero in place", *FULL_STEP],
    "one of two optimizers": ["inside side", "zero matrices", *FULL_STEP],
    "two optimizers": ["inside side", "zero", "step", *FULL_STEP],
    "zero_grad of one's own": ["inside side", "zero", *FULL_STEP],
}


class OwnZeroGrad(torch.optim.AdamW):
    """AdamW whose `zero_grad` does not call torch's."""

    def zero_grad(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def own_optimizer(model):
    return {"all": OwnZeroGrad(list(model.parameters()), **cases.OPTIMIZER["params"])}


def run(program, model, loss, accumulate, optimizers=None):
    """(weights, parameters that have a gradient before each step)."""
    parameters = list(model.parameters())
    optimizers = optimizers or {
        "matrices": cases.adamw([p for p in parameters if p.ndim > 1]),
        "vectors": cases.adamw([p for p in parameters if p.ndim == 1]),
    }

    def zero(action):
        in_place = {"set_to_none": False} if "in place" in action else {}
        for name, optimizer in optimizers.items():
            if name == "matrices" or not action.endswith("matrices"):
                optimizer.zero_grad(**in_place)

    has_gradient = []
    for number, action in enumerate(program):
        side = "side" in action
        if action.startswith("inside"):
            with accumulate():
                loss(number, side).backward()
                if action.endswith("zero"):
                    zero(action)
        elif action == "last after zero":
            value = loss(number, side)
            model.zero_grad()
            value.backward()
        elif action.startswith("last"):
            loss(number, side).backward()
        elif action.startswith("zero"):
            zero(action)
        elif action == "block.zero_grad":
            model.blocks[0].zero_grad()
        elif action.startswith("model.zero_grad"):
            model.zero_grad(set_to_none="in place" not in action)
        else:
            has_gradient += [parameter.grad is not None for parameter in parameters]
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
    return {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}, has_gradient


def loss_of(model, world, ranks):
    """Function (number of the micro-batch, side branch) -> mean of the ranks' losses."""
    step = cases.ragged_steps(max(map(len, PROGRAMS.values())) * world, steps=1, keys=())[0]

    def loss(number, side):
        def forward(input_ids):
            return model(input_ids, side)

        losses = [mean_loss(forward, step[number * world + rank])[0] for rank in ranks]
        return torch.stack(losses).mean()

    return loss


def sharded_runs(rank, world, config, programs):
    """Runs in a worker."""
    results = []
    for name in programs:
        model = materialised("plain", tied=True)
        sharded = plait.parallelize(model, config)
        loss = loss_of(model, world, [rank])
        optimizers = own_optimizer(model) if "own" in name else None
        results.append(run(PROGRAMS[name], model, loss, sharded.accumulate, optimizers))
        sharded.close()
    return results


@pytest.mark.parametrize(
    ("world", "stage", "replicas"), [(2, 0, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1), (4, 2, 2)]
)
def test_dropped_gradients_stay_dropped(pool, world, stage, replicas):
    """The same weights, and the same parameters without a gradient, as one process."""
    programs = list(PROGRAMS)
    if world > 2:
        programs = ["gives up", "zeroes in place", "one of two optimizers", "two optimizers"]
    found = pool.run(world, sharded_runs, settings(world, stage, replicas, 1), programs)
    problems = []
    for index, name in enumerate(programs):
        model = materialised("plain", tied=True)
        expected, has_gradient = run(
            PROGRAMS[name], model, loss_of(model, world, list(range(world))), nullcontext
        )
        for rank in range(world):
            weights, rank_has_gradient = found[rank][index]
            if rank_has_gradient != has_gradient:
                problems.append(f"{name}, rank {rank}: other parameters have a gradient")
            try:
                close(weights, expected)
            except AssertionError as error:
                problems.append(f"{name}, rank {rank}: {error}")
    assert not problems, "\n".join(problems)


ENGINE_PROGRAMS = [
    "gives up",
    "gives up twice",
    "zeroes in place",
    "model.zero_grad",
    "model.zero_grad in place",
    "one block's zero_grad",
    "between forward and backward",
    "steps after zero",
    "after a reduced backward",
    "in place after a reduced backward",
]


class EngineOptimizer:
    """Optimizer of `run` whose step is the engine's."""

    def __init__(self, engine):
        self.step = engine.step
        self.zero_grad = engine.optimizer.zero_grad


class Backward:
    """Loss of `run` whose backward is the engine's."""

    def __init__(self, engine, loss):
        self.engine, self.loss = engine, loss

    def backward(self):
        self.engine.backward(self.loss)


def engine_runs(rank, world, config, programs):
    """Weights after each program. Runs in a worker."""
    results = []
    for program in programs:
        engine = plait.initialize(materialised("plain", tied=True), config)

        @contextmanager
        def accumulate(engine=engine):
            engine.set_gradient_accumulation_boundary(False)
            yield
            engine.set_gradient_accumulation_boundary(True)

        loss = loss_of(engine, world, [rank])
        weights, _ = run(
            program,
            engine.module,
            lambda number, side, engine=engine, loss=loss: Backward(engine, loss(number, side)),
            accumulate,
            {"all": EngineOptimizer(engine)},
        )
        results.append(weights)
        engine.close()
    return results


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_dropped_gradients_of_an_engine(pool, stage):
    """`engine.module.zero_grad()` and `engine.optimizer.zero_grad()` between micro-batches."""
    config = settings(2, stage, 1, 1, gradient_clipping=0)
    found = pool.run(2, engine_runs, config, [PROGRAMS[name] for name in ENGINE_PROGRAMS])
    problems = []
    for index, name in enumerate(ENGINE_PROGRAMS):
        model = materialised("plain", tied=True)
        expected, _ = run(PROGRAMS[name], model, loss_of(model, 2, [0, 1]), nullcontext)
        for rank in range(2):
            try:
                close(found[rank][index], expected)
            except AssertionError as error:
                problems.append(f"{name}, rank {rank}: {error}")
    assert not problems, "\n".join(problems)


def reduced_in_another_dtype(rank, world):
    """Weights after each of three programs with bf16. Runs in a worker."""
    results = []
    for dropped in ([], ["inside side", "zero"], ["inside side", "model.zero_grad"]):
        model = materialised("plain", tied=True).float()
        sharded = plait.parallelize(model, settings(world, 1, 1, 1, bf16={"enabled": True}))
        # The same micro-batches, whatever comes before them.
        program = [*dropped, *["zero"] * (2 - len(dropped)), *FULL_STEP]
        results.append(run(program, model, loss_of(model, world, [rank]), sharded.accumulate)[0])
        sharded.close()
    return results


def test_sums_of_another_dtype_are_dropped(pool):
    """The unreduced sum in float32 is not `grad` of any parameter before torch 2.15."""
    for expected, *found in pool.run(2, reduced_in_another_dtype):
        for weights in found:
            assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("zeroed", ["module", "optimizer"])
def test_weights_of_dropped_micro_batches_do_not_count(zeroed):
    """The step divides by the weights of the micro-batches whose gradients it has."""
    config = {
        **settings(1, 0, 1, 3),
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    engine = plait.initialize(torch.nn.Linear(3, 1, bias=False), config)
    before = engine.module.weight.detach().clone()
    for index, weight in enumerate((1, 2, 6)):
        engine.backward(engine(torch.full((1, 3), 2.0**index)).mean(), weight=weight)
        if index == 0:
            getattr(engine, zeroed).zero_grad()
        engine.step()
        if index == 0:
            with pytest.warns(UserWarning, match=r"zero_grad\(\) drops 1 of the 3 micro-batches"):
                getattr(engine, zeroed).zero_grad()
    engine.close()
    expected = torch.full((1, 3), (2 * 2 + 6 * 4) / 8)
    torch.testing.assert_close(before - engine.module.weight, expected)


COMPRESSED = {
    "int8, stage 0": (0, {"compress_gradients": "int8"}),
    "int4, stage 2": (2, {"compress_gradients": "int4", "error_feedback": True}),
}
NOTHING = ["zero", "zero"]
"""As many actions as each of `DROPPED`, so that later actions get the same micro-batches."""
DROPPED = [["inside", "zero"], ["last side", "zero"], ["last", "model.zero_grad"]]


def compressed(stage, parallel, skips=False):
    config = settings(2, stage, 1, 1, gradient_clipping=0)
    config["parallel"] |= parallel
    if skips:
        config["faults"] = {"non_finite": "skip"}
    return config


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("skips", [False, True])
def test_errors_of_an_engines_dropped_gradients(pool, name, skips):
    """The same bits as without the dropped micro-batches, whose errors are dropped too."""
    config = compressed(*COMPRESSED[name], skips=skips)
    programs = [[*dropped, *FULL_STEP, *FULL_STEP] for dropped in (NOTHING, *DROPPED)]
    for expected, *found in pool.run(2, engine_runs, config, programs):
        for dropped, weights in zip(DROPPED, found, strict=True):
            same = [torch.equal(weights[name], expected[name]) for name in expected]
            assert all(same), dropped


def updated_runs(rank, world, config):
    """Weights after three ways to write the same steps. Runs in a worker."""
    results = []
    for way in ("plain", "closure", "by hand"):
        model = materialised("plain", tied=True)
        sharded = plait.parallelize(model, config)
        loss = loss_of(model, world, [rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for number in range(4):

            def closure(number=number, loss=loss, sharded=sharded):
                with sharded.accumulate():
                    loss(number, False).backward()
                value = loss(number, False)
                value.backward()
                return value

            if way == "closure":
                optimizer.step(closure)
            else:
                closure()
                if way == "plain":
                    optimizer.step()
                else:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            if parameter.grad is not None:
                                parameter.sub_(0.5 * parameter.grad)
            model.zero_grad()
        results.append({name: full_tensor_on_cpu(p) for name, p in model.named_parameters()})
        sharded.close()
    return results


@pytest.mark.parametrize("name", COMPRESSED)
def test_zero_grad_after_an_update_keeps_errors(pool, name):
    """Own loops may update in a closure or without an optimizer of torch."""
    for expected, *found in pool.run(2, updated_runs, compressed(*COMPRESSED[name])):
        for weights in found:
            for parameter, value in expected.items():
                torch.testing.assert_close(weights[parameter], value, rtol=1e-12, atol=1e-12)


def skipped_steps(rank, world, config):
    """Weights of two runs, the second with a step that is not finite. Runs in a worker."""
    results = []
    for factor in (0.0, float("inf")):
        model = materialised("plain", tied=True)
        sharded = plait.parallelize(model, config)
        optimizer = cases.adamw(list(model.parameters()))
        loss = loss_of(model, world, [rank])
        for number in range(4):
            value = loss(number, False)
            if number == 1:
                # One gradient overflows, and the others are much larger than those of other steps.
                weight = next(iter(model.parameters()))
                value = 1e6 * value + factor * weight.flatten()[0]
            if number != 1 or factor:
                value.backward()
                sharded.step(optimizer)
        results.append({name: full_tensor_on_cpu(p) for name, p in model.named_parameters()})
        sharded.close()
    return results


def test_errors_of_a_skipped_step_in_an_own_loop(pool):
    config = settings(2, 0, 1, 1, faults={"non_finite": "skip"})
    config["parallel"]["compress_gradients"] = "int8"
    for expected, found in pool.run(2, skipped_steps, config):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
