"""Errors of one rank or of a collective, which are raised on all ranks.

`naming` replaces torch's error of a failed collective with one that has the name of the collective
and the likely cause. Only waits in shared memory (`comm.shared_memory`) can name a rank whose
process has ended. gloo and NCCL only report that the connection to some rank was lost.

If the work of some ranks fails, `run_on_all_ranks` raises the error of the first of them on all
ranks. Otherwise the ranks without an error would wait in the next collective until the process
group times out. The ranks agree by one all-gather of rows of fixed size, which also contain a short
result of each rank.

In the debug mode (`ComparedCollectives`) ranks check before each collective that all of them make
the same call. Without this mode, ranks that issue different collectives would hang, or compute
wrong numbers if the shapes agree. Each rank writes the operation, the shapes, the dtypes and the
line of code to the store of the default group, and reads the entries of other ranks. Calls from
different lines are different collectives even if the shapes agree. The mode costs some messages per
collective, and runs Python code for every operator.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from plait._torch.groups import default_store, process_group_of, timeout_of
from plait._torch.operators import TorchDispatchMode, operator_name, tree_leaves
from plait.cluster.small_messages import all_gather_bytes
from plait.comm.hang import Wait, describe_tensor
from plait.comm.stacks import is_library
from plait.comm.watch import WATCH, group_label, users_line
from plait.errors import CheckpointError, CommunicationError, PlaitError

T = TypeVar("T")
_RESULT_BYTES = 64
_MESSAGE_BYTES = 992
_UNCOMPARED = (
    "send",
    "recv_",
    "recv_any_source_",
    "wait_tensor",
    "_wrap_tensor_autograd",
    "monitored_barrier_",
)
"""Operators that not all ranks of a group call, or that do not communicate."""
_ALL_TO_ALLS = ("alltoall", "all_to_all")
"""Beginnings of the names of operators whose ranks exchange different numbers of rows."""
_MOST_SHAPES = 4
"""Largest number of tensors per call whose shapes are described."""
_STORED_CALLS = 2
"""Number of calls per group and rank whose descriptions stay in the store."""


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
        An error with the likely cause, or None if no collective has raised `error`.
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
            f"{rank} waited for ranks that did not take part, because they are stuck or issue other"
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


def run_on_all_ranks(
    work: Callable[[], T],
    encode_result: Callable[[T], bytes] = lambda _: b"",
    *,
    device: torch.device,
    activity: str,
    group: dist.ProcessGroup | None = None,
    error_class: type[PlaitError] = CheckpointError,
) -> tuple[T, list[bytes]]:
    """Run `work` on all ranks and exchange short results. Collective.

    Args:
        work: Local work without collectives.
        encode_result: Returns at most 64 bytes for the other ranks, given the result of `work`.
        device: Device of the tensors that are gathered.
        activity: Description of the work for error messages.
        group: Group of all ranks, or None for the default group.
        error_class: Class of the error that is raised.

    Returns:
        (this rank's result, bytes of every rank). The bytes of a rank are padded with zeros to 64.

    Raises:
        PlaitError: The work of a rank failed. All ranks raise an `error_class` with the message of
            the lowest rank that failed.
        CommunicationError: A rank has ended or did not answer in time.
    """
    result: T | None = None
    failure: Exception | None = None
    encoded = b""
    message = b""
    try:
        result = work()
        encoded = encode_result(result)
        assert len(encoded) <= _RESULT_BYTES, len(encoded)
    except Exception as error:  # any error, because the other ranks wait for this one
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
    with naming(activity):
        rows = all_gather_bytes(row, device, group)
    results_end = 2 + _RESULT_BYTES
    for rank, other in enumerate(rows):
        length = int.from_bytes(other[:2], "little")
        if length:
            text = other[results_end : results_end + length].decode(errors="replace")
            source = f"rank {rank}, " if len(rows) > 1 else ""
            raise error_class(f"{source}{activity}: {text}") from failure

    assert failure is None
    return result, [other[2:results_end] for other in rows]  # type: ignore[return-value]


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the disk'}: {error.strerror or error}"
    text = str(error)
    if text and isinstance(error, PlaitError | ValueError):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


@dataclass(frozen=True)
class _ComparedCall:
    """A collective that is about to start on this rank.

    Attributes:
        group: Name of the process group.
        rank: This process's rank in the group.
        description: Operation, shapes, line of user code, and callers. Equal on all ranks.
        wait: Wait that is published during the comparison. It has the number of the collective in
            its group, and the global ranks of the group.
    """

    group: str
    rank: int
    description: dict[str, str]
    wait: Wait

    def key(self, rank: int, *, earlier: int = 0) -> str:
        """Return the store's key for a rank's description of this call or of an earlier call."""
        return f"plait-check/{self.group}/{self.wait.sequence - earlier}/{rank}"


class ComparedCollectives(TorchDispatchMode):
    """Dispatch mode that compares the collectives of this thread with those of other ranks.

    Either all ranks must enter the mode or none.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()
        self._store = default_store()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator. If it is a collective, compare it with the other ranks' calls first."""
        # DTensor turns its operators into plain ones, which are dispatched here again.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = operator_name(func)
        if func.namespace in ("c10d", "_c10d_functional") and name not in _UNCOMPARED:
            self._compare(name, args)
        return func(*args, **(kwargs or {}))

    def _compare(self, operation: str, args: tuple[Any, ...]) -> None:
        group = process_group_of(args)
        if group.size() == 1:
            return
        name = group.group_name
        self._counts[name] += 1
        operation = operation.strip("_")
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        # In an all-to-all every rank has its own numbers of rows.
        first = 1 if operation.startswith(_ALL_TO_ALLS) else 0
        shapes = " and ".join(
            describe_tensor(tensor.shape[first:], tensor.dtype) for tensor in tensors[:_MOST_SHAPES]
        )
        if first:
            shapes = f"rows of {shapes}"
        caller = sys._getframe(2)
        call = _ComparedCall(
            name,
            group.rank(),
            description={
                "call": f"{operation} of {shapes}",
                "line": users_line(caller),
                "callers": _callers(caller),
            },
            wait=Wait(
                operation,
                group_label(group.group_desc, name),
                since=time.monotonic(),
                sequence=self._counts[name],
                shape=shapes,
                members=tuple(dist.get_process_group_ranks(group)),
            ),
        )

        self._store.set(call.key(call.rank), json.dumps(call.description))
        if call.wait.sequence > _STORED_CALLS:
            self._store.delete_key(call.key(call.rank, earlier=_STORED_CALLS))
        # The first rank compares itself with all others, and the others with the first. Both sides
        # of a difference then raise an error.
        others = range(1, group.size()) if call.rank == 0 else (0,)
        with WATCH.waiting(call.wait):
            for other in others:
                self._check_same(call, other)

    def _check_same(self, call: _ComparedCall, other: int) -> None:
        """Raise CommunicationError unless rank `other` of the group makes the same call."""
        key = call.key(other)
        this_rank = call.description
        world = dist.group.WORLD
        assert world is not None
        try:
            self._store.wait([key], timedelta(seconds=timeout_of(world)))
        except dist.DistStoreError as error:
            raise CommunicationError(
                f"rank {call.wait.members[other]} has not started collective {call.wait.sequence}"
                f" over {call.wait.axis} ({this_rank['call']} at {this_rank['line']}) within the"
                " timeout; look for an error or a hang in the output of that rank."
                f" {WATCH.hang_cause}"
            ) from error

        theirs = json.loads(self._store.get(key))
        if theirs != this_rank:
            first, second = (
                f"rank {call.wait.members[rank]} is at {description['line']} with"
                f" {description['call']}"
                for rank, description in sorted([(call.rank, this_rank), (other, theirs)])
            )
            raise CommunicationError(
                f"collective {call.wait.sequence} over {call.wait.axis} is not the same on all"
                f" ranks: {first}, {second}; make all ranks issue the same collectives in the same"
                " order"
            )


def _callers(frame: Any) -> str:
    """Return the functions and line numbers of all code on a stack outside libraries."""
    places = []
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(places)
