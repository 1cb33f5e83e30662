"""The record of an optimizer, without processes."""

from unittest import mock

import pytest
import torch
from torch import nn

from plait.checkpoint import states
from plait.checkpoint.states import merge_stages, optimizer_content
from plait.errors import CheckpointError


def record(names):
    """Of a pipeline's stage with these layers: weights decay, biases do not."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if name.endswith(kind)],
            "weight_decay": decay,
        }
        for kind, decay in (("weight", 0.1), ("bias", 0.0))
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return optimizer_content(model, optimizer, configured=optimizer.param_groups).record


def test_a_pipelines_record_names_the_parameters_of_every_stage(monkeypatch):
    """Each in its group, one that is tied between stages once."""
    stages = [record(["first", "tied"]), record(["tied", "last"])]

    # One process has no other stage to gather from.
    monkeypatch.setattr(states, "all_gather_objects", lambda record, group: stages)
    groups = merge_stages(stages[1], mock.Mock(size=lambda: 2))["groups"]
    assert [group["params"] for group in groups] == [
        ["first.weight", "tied.weight", "last.weight"],
        ["first.bias", "tied.bias", "last.bias"],
    ]
    assert [group["now"]["weight_decay"] for group in groups] == [0.1, 0.0]


@pytest.mark.parametrize("key", ["a.b", 0])
def test_a_state_that_no_name_would_find_again(key):
    """`a.b` of `w` would be read as `b` of `w.a`."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight][key] = torch.zeros(2)
    with pytest.raises(CheckpointError, match="which a checkpoint cannot name"):
        optimizer_content(model, optimizer, configured=optimizer.param_groups)
