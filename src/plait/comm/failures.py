"""The error of a collective that torch aborted: which one, and its likely cause.

Shared memory names the rank that ended (`comm.shared_memory`); a socket or NCCL knows only that
somebody did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from plait.comm.watch import WATCH
from plait.errors import CommunicationError


@contextmanager
def naming(operation: str) -> Iterator[None]:
    """Raise CommunicationError for a collective that fails inside. `operation` names it and its
    axis: `all-reduce over dp_replicate`.
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
        operation: Name of the collective, for the message.

    Returns:
        An error with the cause as far as it is known. None if `error` is not of a collective.
    """
    text = str(error)
    is_of_collective = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in text
    )
    if not is_of_collective:
        return None
    rank = f"rank {dist.get_rank()}" if dist.is_initialized() else "this rank"
    if WATCH.found:
        what = WATCH.found
    elif "imed out" in text or "imeout" in text:
        what = (
            f"{rank} waited for ranks that did not take part: one is stuck, or issues other"
            " collectives"
        )
    else:
        what = f"{rank} lost the connection to another one, which ended; the first failure is there"
    return CommunicationError(f"{operation}: {what} ({text.rpartition('] ')[2] or text})")
