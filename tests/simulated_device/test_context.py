"""Context parallelism on simulated GPUs, with attention in tiles and NCCL's order of messages."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import plait
from plait.parallel.context.attention_function import PackedDocuments
from plait.verify.parity import compare, worst
from tests.parity import flash
from tests.parity.context_parallel import Case, build, configured, reference, steps, train

CASES = [
    Case("all-gather-kv", "packed", "mistral", window=True, stage=2),
    Case("ring", "uneven", "llama", stage=3, settings=(("recompute", {"mode": "full"}),)),
    Case("ulysses", "padded", "qwen3", stage=1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_of_sequences(simulated, row, case):
    """Losses, gradients, norms and weights are those of one process on the CPU, on both ranks."""
    traces = simulated.run(case.world, train, case)
    differences = [worst(compare(reference(case), trace)) for trace in traces]
    assert all(difference.ok(1e-10) for difference in differences), differences
    name = f"cp 2 ({case.kind}), {case.data} rows, ZeRO {case.stage}"
    row(name, "one process on the CPU", max(difference.error for difference in differences))


def prepared(rank, world, case):
    """Observe the search for documents in a step of two micro-batches. Runs on every rank.

    Returns:
        The devices on which documents were searched, the number of waits for the device in the
        preparation of a micro-batch, and the bounds of all documents.
    """
    device: Any = sys.modules["simulated_device.on_torch"]
    places = []
    bounds = []
    find = PackedDocuments.from_starts

    def noted(starts, on):
        places.append(starts.device.type)
        documents = find(starts, on)
        assert documents.bounds.device.type == "cuda"
        bounds.append(documents.bounds)
        return documents

    model: Any = build(case)
    model.config._attn_implementation_internal = "flash_attention_2"
    with flash.installed(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(PackedDocuments, "from_starts", noted)
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        first, second = steps(case.data, 2)
        engine.train_batch(first)
        places.clear()
        engine.train_batch(second)
        seen = list(places)
        before = device.copies()["waited"]
        engine.sharded.prepare_batch(second[0])
        waited = device.copies()["waited"] - before
    return seen, waited, [each.tolist() for each in bounds]


def test_documents_are_found_on_the_host(simulated):
    """They are searched once per micro-batch. Neither layers nor recomputation ask the device."""
    case = Case("ulysses", "packed", stage=0, settings=(("recompute", {"mode": "full"}),))
    for places, waited, bounds in simulated.run(2, prepared, case):
        assert places == ["cpu", "cpu"]
        assert waited == 0
        assert all(each == [0, 3, 9, 10, 16, 17, 22, 30, 32] for each in bounds)
