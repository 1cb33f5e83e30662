"""Descriptions of the first difference between the models and settings of two ranks."""

import pytest
import torch
from torch import nn

from plait.config.resolving.resolve import load, resolve

# The public function compares the ranks of a process group. These parts of it need none.
from plait.sharded.alike import _describe_difference, _model_facts, _setting_facts, _version_facts


def tiny(**changes):
    torch.manual_seed(0)
    model = nn.Module()
    model.up = nn.Linear(12, changes.get("width", 24))
    model.norm = nn.BatchNorm1d(3)
    model.head = nn.Linear(12, 24, bias=False)
    if changes.get("tied"):
        model.head.weight = model.up.weight
    if changes.get("frozen"):
        model.norm.weight.requires_grad_(False)
    if changes.get("late"):
        model.up = model._modules.pop("up")
    if changes.get("other"):
        model.norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    model.to(changes.get("dtype", torch.float32))
    if "buffer" in changes:
        model.norm.running_mean = torch.zeros(3, dtype=changes["buffer"])
    return model


@pytest.mark.parametrize(
    ("change", "of_rank_3", "of_others"),
    [
        ({"width": 25}, "`up.weight` float32 [25, 12]", "float32 [24, 12]"),
        ({"dtype": torch.float64}, "`up.weight` float64 [24, 12]", "float32 [24, 12]"),
        ({"frozen": True}, "`norm.weight` float32 [3] frozen", "float32 [3]"),
        ({"tied": True}, "`head.weight` tied to `up.weight`", "float32 [24, 12]"),
        ({"other": True}, "module `norm` InstanceNorm1d", "BatchNorm1d"),
        ({"buffer": torch.float64}, "buffer `norm.running_mean` float64 [3]", "float32 [3]"),
    ],
)
def test_models(change, of_rank_3, of_others):
    facts = list(_model_facts(tiny()))
    assert facts == list(_model_facts(tiny()))
    description = _describe_difference(facts, list(_model_facts(tiny(**change))), [0, 1, 2], [3])
    assert description == f"rank 3 has {of_rank_3}, ranks 0-2 have {of_others}"


def test_order_of_modules():
    facts = list(_model_facts(tiny()))
    late = list(_model_facts(tiny(late=True)))
    expected = "rank 1 has module `norm` where rank 0 has module `up`: the order differs"
    assert _describe_difference(facts, late, [0], [1]) == expected


def test_names_and_lengths():
    """A rank may lack a name, also the last one."""
    facts = [("`a`", "x"), ("`b`", "x")]
    other = [("`a`", "x"), ("`c`", "y")]
    expected = "ranks 1-2 have `c` y where rank 0 has `b` x"
    assert _describe_difference(facts, other, [0], [1, 2]) == expected
    expected = "rank 1 has nothing more where rank 0 has `b` x"
    assert _describe_difference(facts, facts[:1], [0], [1]) == expected


def facts_of(config):
    return list(_setting_facts("", resolve(load(config), world_size=2).model_dump()))


def test_settings_and_versions():
    """All resolved settings are compared, except for folders, which may differ between ranks."""
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    other = {**base, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    description = _describe_difference(facts_of(base), facts_of(other), [0], [1])
    assert description == "rank 1 has setting `optimizer.params.lr` 0.01, rank 0 has 0.001"
    assert facts_of(base) == facts_of({**base, "run": {"folder": "elsewhere"}})
    assert dict(_version_facts(tiny())).keys() == {"plait", "torch", "Python"}
