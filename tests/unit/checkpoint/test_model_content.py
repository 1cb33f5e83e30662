"""Which entries of a model's state are tensors, and which are what a module keeps besides."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from plait.checkpoint import load
from plait.checkpoint.states import model_content, put_values
from plait.errors import InputError


class Keeps(nn.Module):
    """With a name that ends as torch's entry does."""

    def __init__(self):
        super().__init__()
        self.my_extra_state = nn.Parameter(torch.ones(2))
        self.seen = torch.zeros(())

    def get_extra_state(self):
        """A tensor, which is still no parameter."""
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_a_parameter_is_no_extra_state_whatever_its_name():
    model = nn.ModuleDict({"ä/b": Keeps()})
    tensors, values = model_content(model)
    assert list(tensors) == ["model.ä/b.my_extra_state"] and list(values) == ["ä/b._extra_state"]
    other = nn.ModuleDict({"ä/b": Keeps()})
    model["ä/b"].seen = torch.tensor(3.0)
    put_values(other, model_content(model)[1])
    assert other["ä/b"].seen == 3


def test_a_model_without_memory_is_not_filled(monkeypatch):
    monkeypatch.setattr(load, "candidates", lambda folder, tag: [mock.Mock()])
    monkeypatch.setattr(load, "Reader", mock.Mock())
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="on the meta device"):
        load.load_trained(model, Path("x"))
