"""The first difference between ranks, in words; what is compared is what a user built."""

import pytest
import torch
from torch import nn

from plait.config.resolving.resolve import load, resolve
from plait.sharded.alike import _describe_difference, _model_facts, _setting_facts, _version_facts


def tiny(**changes):
    torch.manual_seed(0)
    model = nn.Module()
    model.up, model.norm = nn.Linear(12, changes.get("width", 24)), nn.BatchNorm1d(3)
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
    ("change", "said"),
    [
        ({"width": 25}, "rank 3 has `up.weight` float32 [25, 12], ranks 0-2 have float32 [24, 12]"),
        ({"dtype": torch.float64}, "rank 3 has `up.weight` float64 [24, 12], ranks 0-2 have float32 [24, 12]"),
        ({"frozen": True}, "rank 3 has `norm.weight` float32 [3] frozen, ranks 0-2 have float32 [3]"),
        ({"tied": True}, "rank 3 has `head.weight` tied to `up.weight`, ranks 0-2 have float32 [24, 12]"),
        ({"late": True}, "rank 3 has module `norm` where ranks 0-2 have module `up`: the order differs"),
        ({"other": True}, "rank 3 has module `norm` InstanceNorm1d, ranks 0-2 have BatchNorm1d"),
        ({"buffer": torch.float64}, "rank 3 has buffer `norm.running_mean` float64 [3], ranks 0-2 have float32 [3]"),
    ],
)  # fmt: skip
def test_models(change, said):
    """Shapes, dtypes, what is frozen, ties, order, classes, buffers."""
    usual, other = list(_model_facts(tiny())), list(_model_facts(tiny(**change)))
    assert usual != other and usual == list(_model_facts(tiny()))
    assert _describe_difference(usual, other, [0, 1, 2], [3]) == said


def test_names_and_lengths():
    """A name that one side lacks, at the end too."""
    a = [("`a`", "x"), ("`b`", "x")]
    assert (
        _describe_difference(a, [("`a`", "x"), ("`c`", "y")], [0], [1, 2])
        == "ranks 1-2 have `c` y where rank 0 has `b` x"
    )
    assert (
        _describe_difference(a, a[:1], [0], [1]) == "rank 1 has nothing more where rank 0 has `b` x"
    )


def facts_of(config):
    return list(_setting_facts("", resolve(load(config), world_size=2).model_dump()))


def test_settings_and_versions():
    """Every resolved setting, except folders, which may be a rank's own."""
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    other = {**base, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    said = _describe_difference(facts_of(base), facts_of(other), [0], [1])
    assert said == "rank 1 has setting `optimizer.params.lr` 0.01, rank 0 has 0.001"
    assert facts_of(base) == facts_of({**base, "run": {"folder": "elsewhere"}})
    assert {"plait", "torch", "Python"} == {what for what, _ in _version_facts(tiny())}
