"""The record of an optimizer in a checkpoint, without processes."""

from unittest import mock

import pytest
import torch
from torch import nn

from plait.checkpoint import states
from plait.checkpoint.states import merge_stages, optimizer_content
from plait.errors import CheckpointError


def stage_record(names):
    """Return the record of a pipeline stage with these layers, whose weights decay."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    weights = [layer.weight for layer in model.values()]
    biases = [layer.bias for layer in model.values()]
    groups = [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return optimizer_content(model, optimizer, configured=optimizer.param_groups).record


def test_the_record_of_a_pipeline_has_all_stages(monkeypatch):
    """A parameter that is tied between stages is named once."""
    stages = [stage_record(["first", "tied"]), stage_record(["tied", "last"])]
    # One process has no other stage to gather from.
    monkeypatch.setattr(states, "all_gather_objects", lambda record, group: stages)
    weights, biases = merge_stages(stages[1], mock.Mock(size=lambda: 2))["groups"]
    assert weights["params"] == ["first.weight", "tied.weight", "last.weight"]
    assert biases["params"] == ["first.bias", "tied.bias", "last.bias"]
    assert weights["now"]["weight_decay"] == 0.1 and biases["now"]["weight_decay"] == 0.0


@pytest.mark.parametrize("key", ["a.b", 0])
def test_a_state_with_an_ambiguous_name_is_refused(key):
    """`a.b` of `w` would be read as `b` of `w.a`."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight][key] = torch.zeros(2)
    with pytest.raises(CheckpointError, match="which a checkpoint cannot name"):
        optimizer_content(model, optimizer, configured=optimizer.param_groups)
