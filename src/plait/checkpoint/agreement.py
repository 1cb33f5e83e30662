"""After work that one rank may fail at, all ranks know: one all-gather of a status, and what each
of them brings along.

Without it the others would wait in the next collective until the timeout of the process group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from plait._torch.flat_collectives import all_gather_single
from plait.errors import CheckpointError, PlaitError

T = TypeVar("T")
_BROUGHT = 64
_MESSAGE = 992


def together(
    work: Callable[[], T],
    brings: Callable[[T], bytes] = lambda _: b"",
    *,
    device: torch.device,
    doing: str,
    group: dist.ProcessGroup | None = None,
    raising: type[PlaitError] = CheckpointError,
) -> tuple[T, list[bytes]]:
    """This rank's result of `work`, and what all ranks bring of theirs (at most 64 bytes each).
    Where a rank's work failed, all raise `raising` with the message of the first of them.
    Collective over `group`, of all ranks.
    """
    result: T | None = None
    failed: BaseException | None = None
    try:
        result = work()
        brought = brings(result)
    except Exception as error:  # whatever it is, the others wait for this rank
        failed = error
        brought = b""
    message = ("" if failed is None else _words(failed)).encode()[:_MESSAGE]
    rows = _gathered(
        len(message).to_bytes(2, "little")
        + brought.ljust(_BROUGHT, b"\0")
        + message.ljust(_MESSAGE, b"\0"),
        device,
        group,
    )
    for rank, row in enumerate(rows):
        length = int.from_bytes(row[:2], "little")
        if length:
            words = row[2 + _BROUGHT : 2 + _BROUGHT + length].decode(errors="replace")
            where = f"rank {rank}, " if len(rows) > 1 else ""
            raise raising(f"{where}{doing}: {words}") from failed
    assert failed is None
    return result, [row[2 : 2 + _BROUGHT] for row in rows]  # type: ignore[return-value]


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the disk'}: {error.strerror or error}"
    text = str(error)
    return (
        text
        if text and isinstance(error, PlaitError | ValueError)
        else f"{type(error).__name__}: {text}".removesuffix(": ")
    )


def _gathered(row: bytes, device: torch.device, group: dist.ProcessGroup | None) -> list[bytes]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [row]
    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(device)
    everyone = mine.new_empty(dist.get_world_size() * len(row))
    all_gather_single(everyone, mine, group=group)
    return [bytes(found) for found in everyone.cpu().view(-1, len(row)).numpy()]
