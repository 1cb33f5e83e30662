"""Logits token by token with a KV cache are those of the full sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.cluster.layout import Layout
from plait.cluster.mesh import Mesh
from plait.errors import InputError
from plait.parallel.hooks import Hooks, StepHook
from plait.parallel.parts import Parts
from plait.sharded.misuse import refuse_cache, refuse_own_batches
from plait.verify.keep_float64 import keeping_float64
from tests.parity import cases

LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 3": {"zero_optimization": {"stage": 3}, "parallel": {"dp_shard": 2}},
    "tp": {"parallel": {"tp": 2, "sequence_parallel": False}},
    "tp, sequence parallel": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "pp": {"parallel": {"pp": 2}},
}


def largest_differences(rank, world):
    """Return the largest difference of logits by layout. Runs on every rank."""
    from transformers import DynamicCache

    ids = torch.randint(0, cases.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(3))
    differences = {}
    for name, layout in LAYOUTS.items():
        model = cases.build("llama", tied=False)
        with keeping_float64(model):
            engine = cases.engine(model, {"train_micro_batch_size_per_gpu": 2, **layout})
            full = engine.predict({"input_ids": ids})
            cache = engine.new_cache()
            assert isinstance(cache, DynamicCache) or name == "pp"
            with engine.evaluating():
                outputs = []
                for tokens in ids.split([4, 1, 2], dim=1):
                    outputs.append(engine.predict({"input_ids": tokens}, cache=cache))
            assert cache.get_seq_length() == 7
            if engine.sharded.holds_output:
                logits = torch.cat([output.logits for output in outputs], dim=1)
                differences[name] = float((logits - full.logits).abs().max())
    return differences


def test_a_cache_gives_the_same_logits(pool):
    for differences in pool.run(2, largest_differences):
        assert max(differences.values()) < 1e-12, differences


def training_modes(model):
    return [module.training for module in model.modules()]


def modes_around_evaluations(rank, world):
    """Return the modes of all modules before and after evaluations. Runs on every rank."""
    engine = cases.engine(cases.build("plain", tied=True), {"train_micro_batch_size_per_gpu": 2})
    engine.model.blocks[1].eval()
    before = training_modes(engine.model)
    batch = cases.ragged_steps(1, steps=1, keys=())[0][0]
    engine.predict(batch)
    engine.eval_batch(batch)
    with pytest.raises(ZeroDivisionError), engine.evaluating():
        raise ZeroDivisionError
    return before, training_modes(engine.model)


def test_modules_in_evaluation_mode_stay_in_it(pool):
    """A frozen BatchNorm would otherwise train after the first evaluation."""
    for before, after in pool.run(2, modes_around_evaluations):
        assert before == after and not all(before)


class BatchTransform(StepHook):
    """Returns batches unchanged. Having a `transform` is enough to be refused."""

    def transform(self, batch):
        return batch


def test_layouts_without_a_place_for_a_cache():
    def parts_and_mesh(layout, *hooks):
        parts = Parts(torch.nn.Linear(1, 1), (), hooks=Hooks(hooks))
        return parts, Mesh(layout, torch.device("cpu"), 0, None, None)  # type: ignore[arg-type]

    refuse_cache(*parts_and_mesh(Layout(tp=2)), object())
    with pytest.raises(InputError, match=r"parallel.pp = 2: .* pass what engine.new_cache"):
        refuse_cache(*parts_and_mesh(Layout(pp=2)), object())

    parts, mesh = parts_and_mesh(Layout(), BatchTransform())
    with pytest.raises(InputError, match="BatchTransform must transform every micro-batch"):
        refuse_cache(parts, mesh, object())
    with pytest.raises(InputError, match=r"engine\(...\) passes a batch to the model"):
        refuse_own_batches(parts, "engine(...)")
