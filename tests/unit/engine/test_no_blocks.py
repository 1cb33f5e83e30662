"""A model whose layers are not found is gathered whole by ZeRO stage 3, and that is said (B9)."""

import warnings

import pytest
import torch
from torch import nn

from plait.sharded.misuse import warn_of_no_blocks


def test_a_large_model_without_blocks_is_warned_of():
    with torch.device("meta"):
        model = nn.Linear(8192, 8192)
    with pytest.warns(
        UserWarning,
        match=r"stage = 3: Linear has no list of repeated layers, so all of its 67,117,056 parameters",
    ):
        warn_of_no_blocks(model, (), stage=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_no_blocks(model, ("layers.0",), stage=3)
        warn_of_no_blocks(model, (), stage=2)
        warn_of_no_blocks(nn.Linear(8, 8), (), stage=3)
