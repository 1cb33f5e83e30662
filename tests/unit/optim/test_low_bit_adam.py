"""AdamW with states of fewer bytes, in one process: torchao's optimizers where blocks are the same, torch's AdamW nearly."""

import json

import pytest
import torch
from torch import nn

from plait.config.schema.optimization import OptimizerSpec
from plait.errors import InputError
from plait.optim import low_bit_adam
from plait.optim.low_bit_adam import DynamicInt8, Float8, levels
from plait.optim.optimizer import build_optimizer
from tests.unit.engine.torchao_numbers import (
    BLOCK,
    FILE,
    PARAMS,
    SHAPE,
    STEPS,
    numbers,
    rounds_alike,
    trained,
    unpacked,
    waves,
)


def small(states, kind="AdamW", **params):
    spec = OptimizerSpec(type=kind, states=states, params={**PARAMS, **params})
    return lambda parameters: build_optimizer(spec, [(str(i), p) for i, p in enumerate(parameters)])


@pytest.mark.parametrize(
    ("name", "states", "kind", "params"),
    [
        ("int8", "int8", "AdamW", {}),
        ("float8", "float8", "AdamW", {}),
        ("int8, decay in gradients", "int8", "Adam", {"adam_w_mode": False}),
    ],
)
def test_torchaos_numbers(name, states, kind, params):
    wanted = unpacked(json.loads(FILE.read_text())[f"trained {name}"], torch.float32)
    assert rounds_alike(trained(small(states, kind, **params)), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("kind", "params"),
    [("AdamW", {}), ("Adam", {"adam_w_mode": False}), ("AdamW", {"torch_adam": True})],
)
@pytest.mark.parametrize(("states", "bar"), [("bf16", 0.02), ("int8", 0.05), ("float8", 0.1)])
def test_close_to_torch(states, bar, kind, params, dtype):
    start = waves(4 * 2048).view(SHAPE).to(dtype)
    wanted, found = (trained(small(form, kind, **params), dtype=dtype) for form in (None, states))
    assert found.dtype == dtype
    if dtype == torch.bfloat16:
        bar = max(bar, 0.1)  # torch's own averages are in bfloat16 there
    assert (found - wanted).norm() < bar * (wanted - start).norm()


@pytest.mark.parametrize("states", ["bf16", "int8", "float8"])
def test_where_another_dtype_is_the_default(states):
    """The dtypes of states do not depend on torch's default dtype, also after a step."""

    def dtypes():
        parameter = nn.Parameter(torch.ones(8, 2048, dtype=torch.float32))
        made = small(states)([parameter])
        parameter.grad = torch.ones_like(parameter)
        made.step()
        return {name: value.dtype for name, value in made.state[parameter].items()}

    wanted = dtypes()
    torch.set_default_dtype(torch.float64)
    try:
        assert dtypes() == wanted
    finally:
        torch.set_default_dtype(torch.float32)


def test_decay_of_torch_adam():
    """torch's default decay is 0.01."""
    zero = nn.Parameter(torch.ones(8, 2048))
    spec = OptimizerSpec(states="int8", params={"torch_adam": True, "lr": 1.0})
    made = build_optimizer(spec, [("a", zero)])
    zero.grad = torch.zeros_like(zero)
    made.step()
    torch.testing.assert_close(zero, torch.full_like(zero, 0.99))


@pytest.mark.parametrize("states", ["bf16", "int8", "float8"])
def test_pieces_change_nothing(states, monkeypatch):
    whole = trained(small(states))
    monkeypatch.setattr(low_bit_adam, "_CHUNK_ON_CPU", 1024)
    assert torch.equal(trained(small(states)), whole)


@pytest.mark.parametrize("states", ["bf16", "int8", "float8"])
def test_rows_by_themselves(states, monkeypatch):
    """A shard of full rows computes the same bits as the full parameter."""
    whole = trained(small(states))
    monkeypatch.setattr("plait.parallel.precision.optimizer_states.FEWEST_NUMBERS", 1)
    step = [0]

    def by_rows(parameters):
        rows = [nn.Parameter(row[None].clone()) for row in parameters[0].detach()]
        inner = small(states)(rows)

        class Together:
            def step(self):
                step[0] += 1
                for row, gradient in zip(rows, parameters[0].grad, strict=True):
                    row.grad = gradient[None].clone()
                inner.step()
                parameters[0].data.copy_(torch.cat([row.detach() for row in rows]))

        return Together()

    assert torch.equal(trained(by_rows), whole)
    assert step[0] == STEPS


def test_a_parameter_that_is_not_contiguous():
    plain = nn.Parameter(torch.ones(64, 128))
    other = nn.Parameter(torch.ones(128, 64).t())
    for parameter in (plain, other):
        made = small("int8")([parameter])
        parameter.grad = torch.arange(64 * 128).view(64, 128).float()
        made.step()
    assert torch.equal(plain, other) and not other.is_contiguous()


def test_states_survive_their_own_dictionary():
    """torch's `load_state_dict` would make codes and scales the parameter's dtype."""
    parameter = nn.Parameter(torch.randn(8, 2048).bfloat16())
    vector = nn.Parameter(torch.randn(7).bfloat16())
    first, second = small("int8")([parameter, vector]), small("int8")([parameter, vector])
    for p in (parameter, vector):
        p.grad = torch.randn_like(p)
    first.step()
    second.load_state_dict(first.state_dict())
    for p in (parameter, vector):
        assert set(first.state[p]) == set(second.state[p])
        for name, value in first.state[p].items():
            loaded = second.state[p][name]
            assert loaded.dtype == value.dtype and torch.equal(loaded, value), name
    assert first.state[vector]["exp_avg"].dtype == torch.float32


def test_schedules_work_and_closures_are_refused():
    parameter = nn.Parameter(torch.ones(8, 2048))
    made = small("float8")([parameter])
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    parameter.grad = torch.ones_like(parameter)
    made.step()
    schedule.step()
    assert made.param_groups[0]["lr"] == 0.005
    with pytest.raises(InputError, match="no closure"):
        made.step(lambda: 1.0)


CPU = torch.device("cpu")
THEIRS = json.loads(FILE.read_text())


SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["average", "squares"])


def codec(kind, *, signed):
    return DynamicInt8(signed=signed, device=CPU) if kind == "int8" else Float8(signed=signed)


@SIGNED
def test_levels_are_torchaos(signed):
    theirs = unpacked(THEIRS[f"levels {'average' if signed else 'squares'}"], torch.float32)
    torch.testing.assert_close(levels(signed=signed), theirs, rtol=1.5e-7, atol=0)


@SIGNED
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_codes_are_torchaos(kind, signed):
    name = f"{kind} {'average' if signed else 'squares'}"
    codes, scales = codec(kind, signed=signed).encode(numbers(signed=signed), BLOCK)
    their_codes = unpacked(THEIRS[f"codes {name}"], torch.uint8)
    their_scales = unpacked(THEIRS[f"scales {name}"], torch.float32)
    assert len(set(their_codes.tolist())) > 60
    if not signed:
        assert (their_codes == 0).any() and (codes[their_codes == 0] == 1).all()
        codes, their_codes = codes[their_codes > 0], their_codes[their_codes > 0]
    difference = (codes.int() - their_codes.int()).abs()
    assert difference.max() <= 1 and difference.sum() <= 3
    assert torch.equal(scales, their_scales)


@SIGNED
def test_every_border_between_two_levels(signed):
    """The look-up finds the right level at every border, and one step of a float next to it."""
    table = levels(signed=signed)
    borders = (table[1:] + table[:-1]) / 2
    below, above = (torch.nextafter(borders, torch.tensor(side)) for side in (-2.0, 2.0))
    values = torch.cat([below, borders, above, table])
    # The largest of every block is 1, so that scales are 1.
    blocks = torch.stack([torch.ones_like(values), values], dim=1)
    codes, scales = DynamicInt8(signed=signed, device=CPU).encode(blocks.view(-1), 2)
    assert (scales == 1).all()
    expected = torch.bucketize(blocks.view(-1), borders, right=True).clamp(min=0 if signed else 1)
    assert torch.equal(codes.long(), expected)


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_there_and_back(kind):
    """The error is at most half of the largest distance of two levels. Tiny values are not lost, and 0 stays 0."""
    found = torch.cat([numbers(signed=True), numbers(signed=True) * 1e-30, torch.zeros(256)])
    signed = codec(kind, signed=True)
    codes, scales = signed.encode(found, 256)
    error = (signed.decode(codes, scales) - found).view(-1, 256).abs().amax(1)
    assert (error <= found.view(-1, 256).abs().amax(1) * 0.036).all()
    assert (signed.decode(codes, scales)[-256:] == 0).all()


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_squares_never_become_zero(kind):
    block = torch.zeros(256)
    block[0] = 1.0
    squares = codec(kind, signed=False)
    assert (squares.decode(*squares.encode(block, 256)) > 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_what_is_not_finite_is_seen(kind, bad):
    """Only the block with the value is affected."""
    found = torch.ones(512)
    found[3] = bad
    both = codec(kind, signed=True)
    back = both.decode(*both.encode(found, 256))
    assert not back[:256].isfinite().any()
    assert (back[256:] == 1).all()
