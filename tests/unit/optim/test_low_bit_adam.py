"""AdamW with states of fewer bytes compared with torchao's optimizers and torch's AdamW."""

import json

import pytest
import torch
from torch import nn

from plait.config.schema.optimization import OptimizerSpec
from plait.errors import InputError
from plait.optim import low_bit_adam
from plait.optim.low_bit_adam import DynamicInt8, Float8, levels
from plait.optim.optimizer import build_optimizer
from tests.unit.optim.torchao_numbers import (
    BLOCK,
    FILE,
    PARAMS,
    SHAPE,
    STEPS,
    equal_up_to_rounding,
    numbers,
    trained,
    unpacked,
    waves,
)

CPU = torch.device("cpu")
TORCHAO = json.loads(FILE.read_text())
SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["average", "squares"])
KINDS = pytest.mark.parametrize("kind", ["int8", "float8"])
STATES = pytest.mark.parametrize("states", ["bf16", "int8", "float8"])


def adam(states, kind="AdamW", **params):
    """Return a function that builds the optimizer for a list of parameters."""
    spec = OptimizerSpec(type=kind, states=states, params={**PARAMS, **params})

    def build(parameters):
        return build_optimizer(spec, zip(map(str, range(len(parameters))), parameters, strict=True))

    return build


@pytest.mark.parametrize(
    ("name", "states", "kind", "params"),
    [
        ("int8", "int8", "AdamW", {}),
        ("float8", "float8", "AdamW", {}),
        ("int8, decay in gradients", "int8", "Adam", {"adam_w_mode": False}),
    ],
)
def test_training_equals_torchao(name, states, kind, params):
    expected = unpacked(TORCHAO[f"trained {name}"], torch.float32)
    assert equal_up_to_rounding(trained(adam(states, kind, **params)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("kind", "params"),
    [("AdamW", {}), ("Adam", {"adam_w_mode": False}), ("AdamW", {"torch_adam": True})],
)
@pytest.mark.parametrize(("states", "bar"), [("bf16", 0.02), ("int8", 0.05), ("float8", 0.1)])
def test_close_to_torch(states, bar, kind, params, dtype):
    start = waves(4 * 2048).view(SHAPE).to(dtype)
    expected = trained(adam(None, kind, **params), dtype=dtype)
    actual = trained(adam(states, kind, **params), dtype=dtype)
    assert actual.dtype == dtype
    # torch's own averages of a bfloat16 parameter are in bfloat16.
    tolerance = 0.1 if dtype == torch.bfloat16 else bar
    assert (actual - expected).norm() < tolerance * (expected - start).norm()


@STATES
def test_state_dtypes_do_not_depend_on_the_default(states):
    def dtypes():
        parameter = nn.Parameter(torch.ones(8, 2048, dtype=torch.float32))
        optimizer = adam(states)([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {name: value.dtype for name, value in optimizer.state[parameter].items()}

    expected = dtypes()
    torch.set_default_dtype(torch.float64)
    try:
        assert dtypes() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_decay_of_torch_adam():
    """torch's default decay is 0.01."""
    parameter = nn.Parameter(torch.ones(8, 2048))
    spec = OptimizerSpec(states="int8", params={"torch_adam": True, "lr": 1.0})
    optimizer = build_optimizer(spec, [("a", parameter)])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(parameter, torch.full_like(parameter, 0.99))


@STATES
def test_chunks_change_no_bit(states, monkeypatch):
    expected = trained(adam(states))
    # The parameter of 8192 numbers is one chunk otherwise.
    monkeypatch.setattr(low_bit_adam, "_CHUNK_ON_CPU", 1024)
    assert torch.equal(trained(adam(states)), expected)


class RowOptimizer:
    """Optimizer that updates each row of a parameter as a parameter of its own."""

    def __init__(self, states, parameter):
        self.parameter = parameter
        self.rows = [nn.Parameter(row[None].clone()) for row in parameter.detach()]
        self.optimizer = adam(states)(self.rows)
        self.steps = 0

    def step(self):
        self.steps += 1
        for row, gradient in zip(self.rows, self.parameter.grad, strict=True):
            row.grad = gradient[None].clone()
        self.optimizer.step()
        self.parameter.data.copy_(torch.cat(self.rows))


@STATES
def test_a_shard_of_rows_computes_the_same_bits(states, monkeypatch):
    expected = trained(adam(states))
    # A row alone has too few numbers to be quantised, unlike a shard of a larger parameter.
    monkeypatch.setattr("plait.parallel.precision.optimizer_states.FEWEST_NUMBERS", 1)
    optimizers = []

    def build(parameters):
        optimizers.append(RowOptimizer(states, parameters[0]))
        return optimizers[0]

    assert torch.equal(trained(build), expected)
    assert optimizers[0].steps == STEPS


def test_a_parameter_that_is_not_contiguous():
    contiguous = nn.Parameter(torch.ones(64, 128))
    transposed = nn.Parameter(torch.ones(128, 64).t())
    for parameter in (contiguous, transposed):
        optimizer = adam("int8")([parameter])
        parameter.grad = torch.arange(64 * 128).view(64, 128).float()
        optimizer.step()
    assert torch.equal(contiguous, transposed)
    assert not transposed.is_contiguous()


def test_loaded_states_keep_their_dtypes():
    """torch's `load_state_dict` converts codes and scales to the parameter's dtype."""
    matrix = nn.Parameter(torch.randn(8, 2048).bfloat16())
    vector = nn.Parameter(torch.randn(7).bfloat16())
    saved = adam("int8")([matrix, vector])
    loaded = adam("int8")([matrix, vector])
    for parameter in (matrix, vector):
        parameter.grad = torch.randn_like(parameter)
    saved.step()
    loaded.load_state_dict(saved.state_dict())
    for parameter in (matrix, vector):
        # assert_close compares keys and dtypes, too.
        torch.testing.assert_close(loaded.state[parameter], saved.state[parameter], rtol=0, atol=0)
    assert loaded.state[vector]["exp_avg"].dtype == torch.float32


def test_schedules_work_and_closures_are_refused():
    parameter = nn.Parameter(torch.ones(8, 2048))
    optimizer = adam("float8")([parameter])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.005
    with pytest.raises(InputError, match="no closure"):
        optimizer.step(lambda: 1.0)


def codec(kind, *, signed):
    return DynamicInt8(signed=signed, device=CPU) if kind == "int8" else Float8(signed=signed)


@SIGNED
def test_levels_equal_torchao(signed):
    expected = unpacked(TORCHAO[f"levels {'average' if signed else 'squares'}"], torch.float32)
    torch.testing.assert_close(levels(signed=signed), expected, rtol=1.5e-7, atol=0)


@SIGNED
@KINDS
def test_codes_equal_torchao(kind, signed):
    name = f"{kind} {'average' if signed else 'squares'}"
    codes, scales = codec(kind, signed=signed).encode(numbers(signed=signed), BLOCK)
    expected = unpacked(TORCHAO[f"codes {name}"], torch.uint8)
    assert len(expected.unique()) > 60
    if not signed:
        # A square never becomes 0 here, because its update would be divided by epsilon.
        assert (expected == 0).any()
        assert (codes[expected == 0] == 1).all()
        codes = codes[expected > 0]
        expected = expected[expected > 0]
    # A few numbers are within the rounding of float32 of the middle between two levels.
    difference = (codes.int() - expected.int()).abs()
    assert difference.max() <= 1
    assert difference.sum() <= 3
    assert torch.equal(scales, unpacked(TORCHAO[f"scales {name}"], torch.float32))


@SIGNED
def test_every_border_between_two_levels(signed):
    """The look-up is right at every border, and at the next float on either side."""
    table = levels(signed=signed)
    borders = (table[1:] + table[:-1]) / 2
    below = torch.nextafter(borders, torch.tensor(-2.0))
    above = torch.nextafter(borders, torch.tensor(2.0))
    values = torch.cat([below, borders, above, table])
    # The largest number of every block is 1, so that scales are 1.
    blocks = torch.stack([torch.ones_like(values), values], dim=1)
    codes, scales = DynamicInt8(signed=signed, device=CPU).encode(blocks.view(-1), 2)
    assert (scales == 1).all()
    expected = torch.bucketize(blocks.view(-1), borders, right=True).clamp(min=0 if signed else 1)
    assert torch.equal(codes.long(), expected)


@KINDS
def test_decoding_is_close_to_the_encoded_numbers(kind):
    """The error is at most half the largest distance of two levels. 0 stays 0."""
    values = torch.cat([numbers(signed=True), numbers(signed=True) * 1e-30, torch.zeros(256)])
    signed = codec(kind, signed=True)
    decoded = signed.decode(*signed.encode(values, 256))
    error = (decoded - values).view(-1, 256).abs().amax(1)
    assert (error <= values.view(-1, 256).abs().amax(1) * 0.036).all()
    assert (decoded[-256:] == 0).all()


@KINDS
def test_squares_never_become_zero(kind):
    block = torch.zeros(256)
    block[0] = 1.0
    squares = codec(kind, signed=False)
    assert (squares.decode(*squares.encode(block, 256)) > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@KINDS
def test_a_block_with_a_non_finite_number_is_not_finite(kind, bad):
    values = torch.ones(512)
    values[3] = bad
    signed = codec(kind, signed=True)
    decoded = signed.decode(*signed.encode(values, 256))
    assert not decoded[:256].isfinite().any()
    assert (decoded[256:] == 1).all()
