"""Errors of collectives that torch aborted: the collective and its likely cause.

Shared memory names the rank that ended (`comm.shared_memory`). A socket or NCCL only reports that
some rank did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from plait.comm.watch import WATCH
from plait.errors import CommunicationError


@contextmanager
def naming(operation: str) -> Iterator[None]:
    """Raise CommunicationError if a collective inside the block fails.

    Args:
        operation: Name of the collective and of its mesh dimension for the message, for example
            `all-reduce over dp_replicate`.
    """
    try:
        yield
    except RuntimeError as error:
        failure = failed_collective(error, operation)
        if failure is None:
            raise
        raise failure from error


def failed_collective(error: BaseException, operation: str) -> CommunicationError | None:
    """Return the error to raise instead of torch's error of a failed collective.

    Args:
        error: Any error.
        operation: Name of the collective for the message.

    Returns:
        An error with the cause as far as it is known. None if `error` is not of a collective.
    """
    text = str(error)
    # gloo raises a plain RuntimeError for a connection that another process has closed.
    is_gloo_error = isinstance(error, RuntimeError) and "gloo" in text
    if not isinstance(error, dist.DistError) and not is_gloo_error:
        return None

    rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"
    if WATCH.hang_cause:
        reason = WATCH.hang_cause
    elif "imed out" in text or "imeout" in text:
        reason = (
            f"{rank} waited for ranks that did not take part: one is stuck, or issues other"
            " collectives"
        )
    else:
        reason = (
            f"{rank} lost the connection to another rank, which has ended; the first failure is"
            " reported there"
        )
    # torch puts the place in its own sources in front: `[.../gloo/transport/tcp/pair.cc:544] `.
    message = text.rpartition("] ")[2] or text
    return CommunicationError(f"{operation}: {reason} ({message})")
