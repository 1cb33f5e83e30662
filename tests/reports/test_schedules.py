"""Reports about DeepSpeed's schedules, compared with what their documentation says."""

import pytest
import torch

from plait.config.schema.optimization import SchedulerSpec
from plait.optim.lr_schedules import build_scheduler

CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}


def run(params, steps=12):
    """Groups of an AdamW with two of them, after every step of a OneCycle."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": [weights[0]], "betas": (0.9, 0.95)}, {"params": [weights[1]]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    spec = SchedulerSpec.model_validate({"type": "OneCycle", "params": params})
    scheduler = build_scheduler(spec, optimizer, total_steps=steps)
    groups_by_step = []
    for _ in range(steps):
        groups_by_step.append(
            [{"lr": g["lr"], "betas": g["betas"]} for g in optimizer.param_groups]
        )
        optimizer.step()
        scheduler.step()
    return groups_by_step


@pytest.mark.xfail(
    strict=True,
    reason="OneCycle replaces the second of betas by 0.99, as DeepSpeed does before its #8495",
)
def test_report_deepspeed_8495():
    """Cycling the first of `betas` leaves the second as it is."""
    for groups in run(CYCLE):
        assert [group["betas"][1] for group in groups] == [0.95, 0.98]


def test_report_deepspeed_1497():
    """A decay without a step size does not divide by zero; the rate stays at its lowest."""
    rates = [groups[0]["lr"] for groups in run(CYCLE)]
    assert max(rates) == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.01)


def test_report_deepspeed_8201():
    """Bounds may be lists, with a value per parameter group."""
    groups_by_step = run({**CYCLE, "cycle_max_lr": [0.1, 0.2], "cycle_min_mom": [0.8, 0.7]})
    assert [max(g[at]["lr"] for g in groups_by_step) for at in range(2)] == pytest.approx(
        [0.1, 0.2]
    )
    assert [min(g[at]["betas"][0] for g in groups_by_step) for at in range(2)] == pytest.approx(
        [0.8, 0.7]
    )


@pytest.mark.xfail(
    strict=True,
    reason="a positive decay_mom_rate raises the momentum, as DeepSpeed does before its #8589",
)
def test_report_deepspeed_8589():
    """The momentum decays after the cycle."""
    groups_by_step = run({**CYCLE, "decay_mom_rate": 0.01, "decay_step_size": 1})
    assert groups_by_step[-1][0]["betas"][0] < 0.9
