"""Weights that another library has quantised are refused where they would not be what they were. Stand-ins for its classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plait.errors import ModelError
from plait.parallel.parameter_checks import refuse_quantised


def model_with(library: str, kind: str) -> nn.Module:
    made: Any = type(kind, (nn.Parameter,), {"__module__": f"{library}.nn.modules"})
    model = nn.Linear(2, 2)
    model.weight = made(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    return model


@pytest.mark.parametrize("sharded", [True, False])
def test_bitsandbytes(sharded: bool) -> None:
    model = model_with("bitsandbytes", "Params4bit")
    with pytest.raises(ModelError, match="weight is Params4bit of bitsandbytes.*ZeRO stage 0"):
        refuse_quantised(model, sharded=sharded, moved=not sharded, several=True)
    refuse_quantised(model, sharded=False, moved=False, several=True)


def test_torchao() -> None:
    model = model_with("torchao", "Int8Tensor")
    with pytest.raises(ModelError, match="weight is Int8Tensor of torchao"):
        refuse_quantised(model, sharded=False, moved=False, several=True)
    refuse_quantised(model, sharded=False, moved=False, several=False)


def test_others() -> None:
    refuse_quantised(nn.Linear(2, 2), sharded=True, moved=True, several=True)
