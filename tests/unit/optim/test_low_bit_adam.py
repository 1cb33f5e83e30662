"""AdamW with states of fewer bytes, in one process: torchao's optimizers where blocks are the same, torch's AdamW nearly."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from plait.config.schema.optimization import OptimizerSpec
from plait.errors import InputError
from plait.optim import low_bit_adam
from plait.optim.optimizer import build_optimizer
from tests.unit.engine.torchao_numbers import (
    FILE,
    PARAMS,
    SHAPE,
    STEPS,
    rounds_alike,
    trained,
    unpacked,
    waves,
)


def small(states: str | None, kind: str = "AdamW", **params: Any) -> Any:
    return lambda parameters: build_optimizer(
        OptimizerSpec(type=kind, states=states, params={**PARAMS, **params}),
        [(str(i), p) for i, p in enumerate(parameters)],
    )


@pytest.mark.parametrize(
    ("name", "states", "kind", "params"),
    [
        ("int8", "int8", "AdamW", {}),
        ("float8", "float8", "AdamW", {}),
        ("int8, decay in gradients", "int8", "Adam", {"adam_w_mode": False}),
    ],
)
def test_torchaos_numbers(name: str, states: str, kind: str, params: dict[str, Any]) -> None:
    """No square becomes 0 there."""
    wanted = unpacked(json.loads(FILE.read_text())[f"trained {name}"], torch.float32)
    assert rounds_alike(trained(small(states, kind, **params)), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("kind", "params"),
    [("AdamW", {}), ("Adam", {"adam_w_mode": False}), ("AdamW", {"torch_adam": True})],
)
@pytest.mark.parametrize(("states", "bar"), [("bf16", 0.02), ("int8", 0.05), ("float8", 0.1)])
def test_close_to_torch(
    states: str, bar: float, kind: str, params: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of the way that torch's optimizer went."""
    start = waves(4 * 2048).view(SHAPE).to(dtype)
    wanted, found = (trained(small(form, kind, **params), dtype=dtype) for form in (None, states))
    assert found.dtype == dtype
    if dtype == torch.bfloat16:
        bar = max(bar, 0.1)  # torch's own averages are in bfloat16 there
    assert (found - wanted).norm() < bar * (wanted - start).norm()


@pytest.mark.parametrize("states", ["bf16", "int8", "float8"])
def test_where_another_dtype_is_the_default(states: str) -> None:
    """States are of what they are whatever `torch.zeros` makes, also after a step."""

    def dtypes() -> dict[str, torch.dtype]:
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


def test_decay_of_torch_adam() -> None:
    """torch's default decay, 0.01, where nothing else is said."""
    zero = nn.Parameter(torch.ones(8, 2048))
    made = build_optimizer(
        OptimizerSpec(states="int8", params={"torch_adam": True, "lr": 1.0}), [("a", zero)]
    )
    zero.grad = torch.zeros_like(zero)
    made.step()
    torch.testing.assert_close(zero, torch.full_like(zero, 0.99))


@pytest.mark.parametrize("states", ["bf16", "int8", "float8"])
def test_pieces_change_nothing(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(small(states))
    monkeypatch.setattr(low_bit_adam, "_CHUNK_ON_CPU", 1024)
    assert torch.equal(trained(small(states)), whole)


@pytest.mark.parametrize("states", ["bf16", "int8", "float8"])
def test_rows_by_themselves(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a shard of whole rows computes is what the whole parameter does, to the bit."""
    whole = trained(small(states))
    monkeypatch.setattr("plait.parallel.precision.optimizer_states.FEWEST_NUMBERS", 1)
    made, step = [], [0]

    def by_rows(parameters: list[nn.Parameter]) -> Any:
        rows = [nn.Parameter(row[None].clone()) for row in parameters[0].detach()]
        made.extend(rows)
        inner = small(states)(rows)

        class Together:
            def step(self) -> None:
                step[0] += 1
                for row, gradient in zip(rows, parameters[0].grad, strict=True):  # type: ignore[arg-type]
                    row.grad = gradient[None].clone()
                inner.step()
                parameters[0].data.copy_(torch.cat([row.detach() for row in rows]))

        return Together()

    assert torch.equal(trained(by_rows), whole)
    assert step[0] == STEPS


def test_a_parameter_that_is_not_contiguous() -> None:
    plain = nn.Parameter(torch.ones(64, 128))
    other = nn.Parameter(torch.ones(128, 64).t())
    for parameter in (plain, other):
        made = small("int8")([parameter])
        parameter.grad = torch.arange(64 * 128).view(64, 128).float()
        made.step()
    assert torch.equal(plain, other) and not other.is_contiguous()


def test_states_survive_their_own_dictionary() -> None:
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
            assert second.state[p][name].dtype == value.dtype and torch.equal(
                second.state[p][name], value
            ), name
    assert first.state[vector]["exp_avg"].dtype == torch.float32


def test_schedules_work_and_closures_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(8, 2048))
    made = small("float8")([parameter])
    schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    parameter.grad = torch.ones_like(parameter)
    made.step()
    schedule.step()
    assert made.param_groups[0]["lr"] == 0.005
    with pytest.raises(InputError, match="no closure"):
        made.step(lambda: 1.0)
