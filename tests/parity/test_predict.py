"""Predictions token by token, with what the model keeps of earlier ones, are those of the full sequence."""

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

CASES: dict[str, dict[str, Any]] = {
    "stage 3": {"zero_optimization": {"stage": 3}, "parallel": {"dp_shard": 2}},
    "tp": {"parallel": {"tp": 2, "sequence_parallel": False}},
    "tp, sequence parallel": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "pp": {"parallel": {"pp": 2}},
}


def differences(rank, world):
    """The largest one of a case. Runs in a worker."""
    from transformers import DynamicCache

    ids = torch.randint(0, cases.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(3))
    found = {}
    for name, settings in CASES.items():
        model = cases.build("llama", tied=False)
        with keeping_float64(model):
            engine = cases.engine(model, {"train_micro_batch_size_per_gpu": 2, **settings})
            full = engine.predict({"input_ids": ids})
            cache = engine.new_cache()
            assert isinstance(cache, DynamicCache) or name == "pp"
            with engine.evaluating():
                parts = [
                    engine.predict({"input_ids": ids[:, at]}, cache=cache)
                    for at in (slice(0, 4), slice(4, 5), slice(5, 7))
                ]
            assert cache.get_seq_length() == 7
            if engine.sharded.holds_output:
                found[name] = float(
                    (torch.cat([part.logits for part in parts], dim=1) - full.logits).abs().max()
                )
    return found


def test_a_cache_gives_the_same_logits(pool):
    for found in pool.run(2, differences):
        assert max(found.values()) < 1e-12, found


def modes(rank, world):
    """Whether each module trains, before and after evaluations. Runs in a worker."""
    engine = cases.engine(cases.build("plain", tied=True), {"train_micro_batch_size_per_gpu": 2})
    engine.model.blocks[1].eval()
    before = [module.training for module in engine.model.modules()]
    batch = cases.ragged_steps(1, steps=1, keys=())[0][0]
    engine.predict(batch)
    engine.eval_batch(batch)
    with pytest.raises(ZeroDivisionError), engine.evaluating():
        raise ZeroDivisionError
    return before, [module.training for module in engine.model.modules()]


def test_modules_in_evaluation_mode_stay_in_it(pool):
    """A frozen BatchNorm would otherwise train from the first evaluation on."""
    for before, after in pool.run(2, modes):
        assert before == after and not all(before)


class Cuts(StepHook):
    def transform(self, batch):
        return batch


def test_where_there_is_no_place_for_a_cache():
    """Refused by the layout."""

    def at(layout, *hooks):
        return Parts(torch.nn.Linear(1, 1), (), hooks=Hooks(hooks)), Mesh(
            layout, torch.device("cpu"), 0, None, None
        )  # type: ignore[arg-type]

    refuse_cache(*at(Layout(tp=2)), object())
    with pytest.raises(
        InputError,
        match="parallel.pp = 2: predict.* got a object, but each of 2 stages .* pass what engine.new_cache",
    ):
        refuse_cache(*at(Layout(pp=2)), object())
    with pytest.raises(
        InputError,
        match="passes a batch to the model unchanged, but Cuts must transform every micro-batch",
    ):
        refuse_cache(*at(Layout(), Cuts()), object())
    with pytest.raises(InputError, match=r"engine\(...\) passes a batch to the model"):
        refuse_own_batches(at(Layout(), Cuts())[0], "engine(...)")
