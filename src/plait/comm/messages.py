"""Messages between two ranks of a group: tensors, and pickled objects.

Note [Groups of messages]
    Each direction (to higher ranks, to lower ranks) has its own process group. The messages from
    one rank to another are therefore one ordered stream, which no message in the other direction
    can block. A send returns at once, and its tensors are referenced until they are delivered. Both
    ranks of a pair must agree on the order of their messages. The order follows from the schedule,
    which is the same on all ranks.

    gloo matches the messages of each pair separately. NCCL executes the operations of a
    communicator one after another, even for different peers. A receive that was started early would
    delay this rank's next send, and stages would wait for each other in a circle. With NCCL and
    more than two ranks each direction therefore has three groups (lanes), in each of which a rank
    has at most one peer.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster.mesh import LANES
from plait.comm.all_reduce import launched
from plait.comm.failures import naming
from plait.comm.hang import Wait, describe_tensor
from plait.comm.watch import WATCH
from plait.errors import CommunicationError


@dataclass(frozen=True)
class PendingReceive:
    """Tensors that are being received, whose values are valid after `wait`.

    Attributes:
        tensors: Buffers of the tensors.
        works: Receive operation of each tensor.
        source: Global rank of the sender.
    """

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    source: int

    def wait(self) -> tuple[torch.Tensor, ...]:
        """Wait until the tensors have arrived, and return them."""
        with naming("message between pipeline stages"):
            for work, tensor in zip(self.works, self.tensors, strict=True):
                if work.is_completed():
                    work.wait()
                    continue
                shape = describe_tensor(tensor.shape, tensor.dtype)
                wait = Wait("message", "pp", time.monotonic(), shape=shape, missing=(self.source,))
                with WATCH.waiting(wait):
                    work.wait()
        return self.tensors


def lane(source: int, destination: int) -> int:
    """Return the index of the lane for messages between two ranks, see Note [Groups of messages].

    Pairs of neighbours alternate between two lanes. The last and the first rank use the third.
    """
    low, high = sorted((source, destination))
    if high - low == 1:
        return low % 2
    return LANES - 1


class Messenger:
    """Point-to-point messages of one rank.

    All ranks in arguments and attributes are ranks within the group.

    Args:
        groups: One pair of process groups per lane, or one pair for all messages. The first group
            of a pair is for messages to higher ranks, the second for messages to lower ranks.
        device: Device of the tensors.

    Attributes:
        rank: This process's rank in the group.
        device: Device of the tensors.
        sent_bytes: Bytes of the tensors sent so far. Objects are not included.
    """

    def __init__(
        self, groups: Sequence[tuple[dist.ProcessGroup, dist.ProcessGroup]], *, device: torch.device
    ) -> None:
        self.rank = dist.get_rank(groups[0][0])
        self.device = device
        self.sent_bytes = 0
        self._groups = tuple(groups)
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._tag = 0
        """Tag of all messages. It changes after a failure, so that later messages match no earlier
        ones.
        """
        self._lost: list[tuple[dist.Work, torch.Tensor]] = []
        self._has_begun = False

    def send(self, tensors: Iterable[torch.Tensor], *, to: int) -> None:
        """Start sending tensors, each in a separate message."""
        self.forget_delivered()
        for tensor in tensors:
            contiguous = tensor.detach().contiguous()
            self.sent_bytes += contiguous.numel() * contiguous.element_size()
            self._sending.append((self._isend(contiguous, to), contiguous))

    def receive(
        self, like: Sequence[tuple[torch.Size, torch.dtype]], *, source: int
    ) -> PendingReceive:
        """Start receiving tensors.

        Args:
            like: Shape and dtype of each tensor.
            source: Rank that sends the tensors.
        """
        buffers = tuple(
            torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in like
        )
        works = tuple(self._irecv(buffer, source) for buffer in buffers)
        group = self._group_between(source, self.rank)
        return PendingReceive(buffers, works, dist.get_global_rank(group, source))

    def send_object(self, value: object, *, to: int) -> None:
        """Start sending a picklable object."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        for tensor in (length, data):
            self._sending.append((self._isend(tensor, to), tensor))

    def receive_object(self, *, source: int) -> Any:
        """Wait for an object and return it."""
        length = torch.empty(1, dtype=torch.int64, device=self.device)
        self._irecv(length, source).wait()
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._irecv(data, source).wait()
        # The sender is a process of the same run, so its pickles can be trusted.
        return pickle.loads(data.cpu().numpy().tobytes())

    def forget_delivered(self) -> None:
        """Drop the references to tensors that have been delivered."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def finish(self) -> None:
        """Wait until all messages of this rank have been delivered."""
        with naming("messages between pipeline stages"):
            while self._sending:
                self._sending.popleft()[0].wait()
        self._has_begun = False

    def forget(self) -> None:
        """Abandon the messages in flight. All ranks must call this after a step has failed.

        No rank waits for these messages, and no later receive can match them.

        Raises:
            CommunicationError: The backend is NCCL and messages are in flight. NCCL matches
                messages only by their order.
        """
        if self._has_begun and dist.get_backend(self._groups[0][0]) != "gloo":
            raise CommunicationError(
                "the step of a pipeline failed while messages between its stages were in flight,"
                " which cannot be cancelled; start again from the last checkpoint"
            )
        # The memory of a message must exist until it is delivered.
        self._lost.extend(self._sending)
        self._sending.clear()
        self._tag += 1
        self._has_begun = False

    def _isend(self, tensor: torch.Tensor, to: int) -> dist.Work:
        self._has_begun = True
        group = self._group_between(self.rank, to)
        return launched(dist.isend(tensor, group=group, group_dst=to, tag=self._tag))

    def _irecv(self, buffer: torch.Tensor, source: int) -> dist.Work:
        self._has_begun = True
        group = self._group_between(source, self.rank)
        return launched(dist.irecv(buffer, group=group, group_src=source, tag=self._tag))

    def _group_between(self, source: int, destination: int) -> dist.ProcessGroup:
        index = lane(source, destination) if len(self._groups) > 1 else 0
        to_higher, to_lower = self._groups[index]
        return to_higher if destination > source else to_lower
