"""The state of a model is divided into tensors and the extra state of its modules."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from plait.checkpoint import load
from plait.checkpoint.states import model_content, put_values
from plait.errors import InputError


class ExtraState(nn.Module):
    """A module with a tensor as extra state, and a parameter whose name ends like its entry."""

    def __init__(self):
        super().__init__()
        self.my_extra_state = nn.Parameter(torch.ones(2))
        self.count = torch.zeros(())

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


def test_a_parameter_is_no_extra_state_whatever_its_name():
    model = nn.ModuleDict({"ä/b": ExtraState()})
    tensors, values = model_content(model)
    assert list(tensors) == ["model.ä/b.my_extra_state"] and list(values) == ["ä/b._extra_state"]
    model["ä/b"].count = torch.tensor(3.0)
    other = nn.ModuleDict({"ä/b": ExtraState()})
    put_values(other, model_content(model)[1])
    assert other["ä/b"].count == 3


def test_a_model_on_meta_cannot_be_loaded(monkeypatch):
    monkeypatch.setattr(load, "candidates", lambda folder, tag: [mock.Mock()])
    monkeypatch.setattr(load, "Reader", mock.Mock())
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="on the meta device"):
        load.load_trained(model, Path("x"))
