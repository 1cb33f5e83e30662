"""What other engines are given, and what is refused before any process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.config.resolving.resolve import Resolved, load, resolve
from plait.errors import PlaitError
from plait.verify import peers
from plait.verify.model_under_test import TestedModel
from plait.verify.plan import VerificationPlan, in_float32, refuse_peer


def resolved(world_size: int = 2, **config: Any) -> Resolved:
    return resolve(
        load({"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5, **config}),
        world_size=world_size,
    )


def plan(
    file: dict[str, Any] | None = None, *, device: Any = "cpu", **config: Any
) -> VerificationPlan:
    small, _ = in_float32(resolved(**config))
    tested = TestedModel(title="test", vocabulary=4)
    return VerificationPlan(
        tested,
        small,
        "deepspeed",
        ("configured",),
        2,
        "float32",
        (),
        (),
        device=device,
        deepspeed=file,
    )


def test_a_deepspeed_file_stays_itself() -> None:
    """But for what the comparison sets: batch, precision, a constant learning rate; `auto` is DeepSpeed's default."""
    zero = {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "round_robin_gradients": True,
    }
    file = {
        "zero_optimization": zero,
        "train_batch_size": 512,
        "bf16": {"enabled": True},
        "scheduler": {"type": "WarmupLR"},
        "prescale_gradients": True,
        "gradient_clipping": "auto",
    }
    given = peers.deepspeed_config(plan(file, zero_optimization={"stage": 2}))
    assert given["zero_optimization"] == {
        "stage": 2,
        "overlap_comm": True,
        "round_robin_gradients": True,
    }
    assert given["prescale_gradients"] is True
    assert (
        given["train_micro_batch_size_per_gpu"] == 2 and given["gradient_accumulation_steps"] == 1
    )
    assert given["gradient_clipping"] == 0.5
    assert not {"bf16", "scheduler", "train_batch_size"} & set(given)
    assert file["zero_optimization"]["reduce_bucket_size"] == "auto", "the file is not changed"  # type: ignore[index]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_optimizer(device: str) -> None:
    """On a CPU torch's, which needs no compilation, with DeepSpeed's default weight decay."""
    given = peers.deepspeed_config(
        plan(device=device, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    )
    extra = {"torch_adam": True, "weight_decay": 0.0} if device == "cpu" else {}
    assert given["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-2, **extra}}
    assert given["zero_optimization"] == {"stage": 0}


def test_precision_is_told() -> None:
    small, told = in_float32(resolved(bf16={"enabled": True}))
    assert small.precision.compute is None
    assert told[0].startswith("computation bfloat16 -> float32")
    assert in_float32(resolved())[1] == []


@pytest.mark.parametrize(
    ("engine", "config", "passes", "installed", "told"),
    [
        (
            "deepspeed",
            {},
            ("configured",),
            False,
            "--engine deepspeed: it is not installed here; .* -m pip install deepspeed",
        ),
        (
            "deepspeed",
            {},
            ("float64", "configured"),
            True,
            "--dtype float64: DeepSpeed trains in float32",
        ),
        (
            "deepspeed",
            {"parallel": {"tp": 2}},
            ("configured",),
            True,
            "parallel.tp = 2: deepspeed is compared on data parallelism",
        ),
        (
            "accelerate",
            {"zero_optimization": {"stage": 3}},
            ("float64",),
            True,
            "--set zero_optimization.stage=0",
        ),
    ],
)
def test_refused(
    engine: Any, config: dict[str, Any], passes: Any, installed: bool, told: str
) -> None:
    with pytest.raises(PlaitError, match=told) as caught:
        refuse_peer(engine, resolved(**config), passes, installed=lambda _: installed)
    assert caught.value.exit_code == 2


def test_accepted() -> None:
    refuse_peer(
        "deepspeed",
        resolved(zero_optimization={"stage": 3}),
        ("configured",),
        installed=lambda _: True,
    )
    refuse_peer("accelerate", resolved(), ("float64", "configured"), installed=lambda _: True)


def test_clipped() -> None:
    """What an engine shows before it clips is compared as the optimizer saw it."""
    gradient = torch.full((4,), 2.0)
    found = peers._clipped({"a": gradient, "b": None}, 4.0, 1.0)
    assert found["b"] is None
    torch.testing.assert_close(found["a"], gradient / 4, rtol=1e-5, atol=0)
    assert peers._clipped({"a": gradient}, 4.0, 0.0)["a"] is not None
    torch.testing.assert_close(peers._clipped({"a": gradient}, 4.0, 0.0)["a"], gradient)
