"""Expert parallelism on simulated GPUs, with states, parameters and activations on the host."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import plait
from plait.cluster.accelerator import HostCopy
from plait.parallel.experts import dispatch
from plait.verify.parity import compare, worst
from tests.parity.experts import Case, build, configured, reference, steps, train

EP2 = (("ep", 2),)
FULL: tuple[str, Any] = ("recompute", {"mode": "full"})
HOST: tuple[str, Any] = ("activation_offload", {"fraction": 1.0})
CASES = [
    Case("mixtral", 2, EP2, balance=True, dp=2, offload="states", offload_to="cpu"),
    Case(
        "qwen3_moe",
        3,
        EP2,
        balance=True,
        dp=2,
        routed="unused",
        offload="both",
        offload_to="cpu",
        settings=(FULL,),
    ),
    Case(
        "mixtral",
        1,
        (("cp", 2), *EP2),
        dp=2,
        data="packed",
        offload="states",
        offload_to="cpu",
        settings=(("context", "ring"),),
    ),
    Case(
        "mixtral",
        3,
        (("cp", 2), *EP2),
        dp=1,
        data="packed",
        settings=(("context", "ulysses"), ("mlp_tile_tokens", 5), FULL, HOST),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_experts(simulated, row, case):
    """Losses, gradients, norms and weights are those of one process on the CPU, on all ranks."""
    expected, _ = reference(case)
    results = simulated.run(case.world, train, case)
    differences = [worst(compare(expected, trace)) for trace, _ in results]
    assert all(difference.ok(1e-10) for difference in differences), differences
    row(case.name, "one process on the CPU", max(difference.error for difference in differences))


def waits(rank, world, case):
    """Count the waits of a training step. Runs on every rank.

    Returns:
        The reads of message sizes that waited, all waits, and the number of layers with experts
        times micro-batches.
    """
    device: Any = sys.modules["simulated_device.on_torch"]
    read: list[bool] = []

    class Counted(HostCopy):
        def values(self):
            if self._event is not None:  # recomputation reads the sizes again without a wait
                read.append(True)
            return super().values()

    engine = plait.initialize(build(case), configured(case), loss_fn=plait.causal_lm_loss)
    first, second = steps(case, 2 * engine.dp_size)
    mine = slice(2 * engine.dp_rank, 2 * (engine.dp_rank + 1))
    engine.train_batch(first[mine])
    before = device.copies()["waited"]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dispatch, "HostCopy", Counted)
        engine.train_batch(second[mine])
    waited = device.copies()["waited"] - before
    layers = sum(isinstance(module.forward, dispatch.Dispatch) for module in engine.model.modules())
    return len(read), waited, 2 * layers


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("stage", [0, 3])
def test_waits(simulated, mode, stage):
    """A layer waits once per micro-batch, for the sizes of its messages."""
    case = Case(
        "qwen3_moe",
        stage,
        EP2,
        dp=2,
        kind="batched_mm",
        mask=False,
        settings=(("recompute", {"mode": mode}),),
    )
    for sizes, others, expected in simulated.run(2, waits, case):
        assert expected > 0
        assert (sizes, others) == (expected, 0)
