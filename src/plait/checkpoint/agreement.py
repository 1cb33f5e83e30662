"""Run work on all ranks and raise the first error of any rank on all of them.

Otherwise the ranks without an error would wait in the next collective until the process group times
out. The agreement is one all-gather of fixed-size rows, which also carry a short result of each
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from plait.cluster.small_messages import all_gather_bytes
from plait.errors import CheckpointError, PlaitError

T = TypeVar("T")
_RESULT_BYTES = 64
_MESSAGE_BYTES = 992


def run_on_all_ranks(
    work: Callable[[], T],
    brings: Callable[[T], bytes] = lambda _: b"",
    *,
    device: torch.device,
    doing: str,
    group: dist.ProcessGroup | None = None,
    raising: type[PlaitError] = CheckpointError,
) -> tuple[T, list[bytes]]:
    """Run `work` on all ranks and exchange short results. Collective.

    Args:
        work: Local work without collectives.
        brings: Encodes the result of `work` as at most 64 bytes for the other ranks.
        device: Device of the tensors that are gathered.
        doing: Description of the work for error messages.
        group: Group of all ranks. None is the default one.
        raising: Class of the error that is raised.

    Returns:
        This rank's result, and the 64 bytes of every rank.

    Raises:
        PlaitError: The work of a rank failed. All ranks raise `raising` with the message of the
            lowest such rank.
    """
    result: T | None = None
    failure: Exception | None = None
    encoded = b""
    message = b""
    try:
        result = work()
        encoded = brings(result)
        assert len(encoded) <= _RESULT_BYTES, len(encoded)
    except Exception as error:  # any error: the other ranks wait for this one
        failure = error
        encoded = b""
        message = _describe(error).encode()[:_MESSAGE_BYTES]

    # Rows have a fixed size, so that one all-gather suffices:
    # [length of the message (2), result (64), message (992)]
    row = (
        len(message).to_bytes(2, "little")
        + encoded.ljust(_RESULT_BYTES, b"\0")
        + message.ljust(_MESSAGE_BYTES, b"\0")
    )
    rows = all_gather_bytes(row, device, group)
    results_end = 2 + _RESULT_BYTES
    for rank, other in enumerate(rows):
        length = int.from_bytes(other[:2], "little")
        if length:
            text = other[results_end : results_end + length].decode(errors="replace")
            source = f"rank {rank}, " if len(rows) > 1 else ""
            raise raising(f"{source}{doing}: {text}") from failure

    assert failure is None
    return result, [other[2:results_end] for other in rows]  # type: ignore[return-value]


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the disk'}: {error.strerror or error}"
    text = str(error)
    if text and isinstance(error, PlaitError | ValueError):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")
