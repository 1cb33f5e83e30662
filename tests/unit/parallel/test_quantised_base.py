"""Weights that another library has quantised are refused where they would not be what they were. Stand-ins for its classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plait.errors import ModelError
from plait.parallel.techniques.shard_units import refuse_quantised


def model_with(library: str, kind: str) -> nn.Module:
    made: Any = type(kind, (nn.Parameter,), {"__module__": f"{library}.nn.modules"})
    model = nn.Linear(2, 2)
    model.weight = made(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    return model


def test_bitsandbytes() -> None:
    model = model_with("bitsandbytes", "Params4bit")
    with pytest.raises(
        ModelError, match="weight is Params4bit of bitsandbytes.*neither split nor moved"
    ):
        refuse_quantised(model, moved=True, cast=False, several=True)
    refuse_quantised(model, moved=False, cast=True, several=True)


@pytest.mark.parametrize(("cast", "several"), [(True, False), (False, True)])
def test_torchao(cast: bool, several: bool) -> None:
    model = model_with("torchao", "Int8Tensor")
    with pytest.raises(ModelError, match="weight is Int8Tensor of torchao"):
        refuse_quantised(model, moved=False, cast=cast, several=several)
    refuse_quantised(model, moved=False, cast=False, several=False)


def test_others() -> None:
    refuse_quantised(nn.Linear(2, 2), moved=True, cast=True, several=True)
