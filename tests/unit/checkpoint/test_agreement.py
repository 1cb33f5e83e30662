"""An error on one rank becomes one that can be raised on all ranks."""

from unittest.mock import patch

import pytest
import torch

from plait.comm import failures
from plait.comm.failures import run_on_all_ranks
from plait.errors import CheckpointError, CommunicationError


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


def test_a_rank_that_has_ended_is_named_with_the_work():
    # gloo raises this if the process of another rank was killed.
    error = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:9619: reset")
    with (
        patch.object(failures, "all_gather_bytes", side_effect=error),
        pytest.raises(CommunicationError, match="^saving: this rank lost the connection"),
    ):
        run_on_all_ranks(lambda: None, device=torch.device("cpu"), activity="saving")
