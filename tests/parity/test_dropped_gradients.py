"""`zero_grad` between the micro-batches of a step drops gradients, as in one process.

Some of them are not reduced yet, and are not in `grad`.
"""

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


def weights_of(model):
    return {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}


def assert_equal(weights, expected):
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def run(program, model, loss, accumulate, optimizers=None):
    """Run the actions of a program.

    Args:
        program: Names of actions, each with one micro-batch or none.
        model: The model.
        loss: Function of the micro-batch's number that returns its loss.
        accumulate: Returns the context of all backwards of a step but the last one.
        optimizers: One for matrices and one for vectors by default.

    Returns:
        The weights, and which parameters had a gradient before each step.
    """
    parameters = list(model.parameters())
    if optimizers is None:
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim == 1]
        optimizers = {"matrices": cases.adamw(matrices), "vectors": cases.adamw(vectors)}

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
    return weights_of(model), has_gradient


def loss_of(model, world, ranks):
    """Return a function of a micro-batch's number and branch: the mean of the ranks' losses."""
    step = cases.ragged_steps(max(map(len, PROGRAMS.values())) * world, steps=1, keys=())[0]

    def loss(number, side):
        def forward(input_ids):
            return model(input_ids, side)

        losses = [mean_loss(forward, step[number * world + rank])[0] for rank in ranks]
        return torch.stack(losses).mean()

    return loss


def weight_problems(programs, results, references):
    """Compare the weights of all programs on all ranks, and return what differs."""
    problems = []
    for index, name in enumerate(programs):
        for rank, of_rank in enumerate(results):
            try:
                close(of_rank[index], references[index])
            except AssertionError as error:
                problems.append(f"{name}, rank {rank}: {error}")
    return problems


def reference_runs(world, programs):
    """Run programs in one process on the micro-batches of all ranks."""
    results = []
    for name in programs:
        model = materialised("plain", tied=True)
        loss = loss_of(model, world, list(range(world)))
        results.append(run(PROGRAMS[name], model, loss, nullcontext))
    return results


def sharded_runs(rank, world, config, programs):
    """Runs on every rank."""
    results = []
    for name in programs:
        model = materialised("plain", tied=True)
        sharded = plait.parallelize(model, config)
        loss = loss_of(model, world, [rank])
        optimizers = None
        if "own" in name:
            optimizers = {"all": OwnZeroGrad(list(model.parameters()), **cases.OPTIMIZER["params"])}
        results.append(run(PROGRAMS[name], model, loss, sharded.accumulate, optimizers))
        sharded.close()
    return results


@pytest.mark.parametrize(
    ("world", "stage", "replicas"), [(2, 0, 1), (2, 1, 1), (2, 2, 1), (2, 3, 1), (4, 2, 2)]
)
def test_dropped_gradients_stay_dropped(pool, world, stage, replicas):
    """Weights, and the parameters that have no gradient, are those of one process."""
    programs = list(PROGRAMS)
    if world > 2:
        programs = ["gives up", "zeroes in place", "one of two optimizers", "two optimizers"]
    results = pool.run(world, sharded_runs, settings(world, stage, replicas, 1), programs)
    references = reference_runs(world, programs)
    weights_of_ranks = [[weights for weights, _ in runs] for runs in results]
    problems = weight_problems(programs, weights_of_ranks, [weights for weights, _ in references])
    for rank, runs in enumerate(results):
        for name, (_, has_gradient), (_, expected) in zip(programs, runs, references, strict=True):
            if has_gradient != expected:
                problems.append(f"{name}, rank {rank}: other parameters have a gradient")
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
        self.engine = engine
        self.loss = loss

    def backward(self):
        self.engine.backward(self.loss)


def engine_runs(rank, world, config, programs):
    """Return the weights after each program. Runs on every rank."""
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
    results = pool.run(2, engine_runs, config, [PROGRAMS[name] for name in ENGINE_PROGRAMS])
    references = [weights for weights, _ in reference_runs(2, ENGINE_PROGRAMS)]
    problems = weight_problems(ENGINE_PROGRAMS, results, references)
    assert not problems, "\n".join(problems)


def reduced_in_another_dtype(rank, world):
    """Return the weights after each of three programs with bf16. Runs on every rank."""
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
    for expected, *others in pool.run(2, reduced_in_another_dtype):
        for weights in others:
            assert_equal(weights, expected)


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
    """The bits are those of a run without the dropped micro-batches, and without their errors."""
    config = compressed(*COMPRESSED[name], skips=skips)
    programs = [[*dropped, *FULL_STEP, *FULL_STEP] for dropped in (NOTHING, *DROPPED)]
    for expected, *others in pool.run(2, engine_runs, config, programs):
        for weights in others:
            assert_equal(weights, expected)


def updated_runs(rank, world, config):
    """Return the weights after three forms of the same steps. Runs on every rank."""
    results = []
    for form in ("plain", "closure", "by hand"):
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

            if form == "closure":
                optimizer.step(closure)
            elif form == "plain":
                closure()
                optimizer.step()
            else:
                closure()
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(0.5 * parameter.grad)
            model.zero_grad()
        results.append(weights_of(model))
        sharded.close()
    return results


@pytest.mark.parametrize("name", COMPRESSED)
def test_zero_grad_after_an_update_keeps_errors(pool, name):
    """Own loops may update in a closure or without an optimizer of torch."""
    for expected, *others in pool.run(2, updated_runs, compressed(*COMPRESSED[name])):
        for weights in others:
            close(weights, expected, rtol=1e-12)


def skipped_steps(rank, world, config):
    """Return the weights of two runs, the second with a step that is not finite.

    Runs on every rank.
    """
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
        results.append(weights_of(model))
        sharded.close()
    return results


def test_errors_of_a_skipped_step_in_an_own_loop(pool):
    config = settings(2, 0, 1, 1, faults={"non_finite": "skip"})
    config["parallel"]["compress_gradients"] = "int8"
    for expected, weights in pool.run(2, skipped_steps, config):
        assert_equal(weights, expected)
