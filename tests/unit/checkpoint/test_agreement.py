"""What one rank fails at, whatever it raises, becomes an error that all ranks can be told."""

import pytest
import torch

from plait.comm.failures import run_on_all_ranks
from plait.errors import CheckpointError


def test_every_error_is_told():
    for error, said in (
        (RuntimeError("no memory"), "RuntimeError: no memory"),
        (MemoryError(), "MemoryError"),
        (KeyError("step"), "KeyError: 'step'"),
        (CheckpointError("x is cut"), "x is cut"),
        (OSError(28, "No space left on device", "a/b"), "a/b: No space left on device"),
    ):

        def work(error=error):
            raise error

        with pytest.raises(CheckpointError) as caught:
            run_on_all_ranks(work, device=torch.device("cpu"), activity="saving")
        assert str(caught.value) == f"saving: {said}" and caught.value.__cause__ is error
