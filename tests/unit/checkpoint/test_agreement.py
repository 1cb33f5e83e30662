"""An error on one rank becomes one that can be raised on all ranks."""

import pytest
import torch

from plait.comm.failures import run_on_all_ranks
from plait.errors import CheckpointError


def test_every_error_becomes_a_message():
    for error, message in (
        (RuntimeError("no memory"), "RuntimeError: no memory"),
        (MemoryError(), "MemoryError"),
        (KeyError("step"), "KeyError: 'step'"),
        (CheckpointError("x is cut"), "x is cut"),
        (OSError(28, "No space left on device", "a/b"), "a/b: No space left on device"),
    ):

        def fail(error=error):
            raise error

        with pytest.raises(CheckpointError) as raised:
            run_on_all_ranks(fail, device=torch.device("cpu"), activity="saving")
        assert str(raised.value) == f"saving: {message}" and raised.value.__cause__ is error
