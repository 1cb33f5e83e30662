"""Messages between two ranks of one group: tensors, and once the description of tensors that were
not sent before.

Each direction (to higher ranks, to lower ranks) has its own process group, so that what one rank
sends to another is one ordered stream that no message in the other direction can block. Sends
return at once and keep their tensors until they are delivered. Both sides must agree on the order
of messages of a pair; that order comes from a schedule, which every rank has.

gloo matches the messages of each pair by themselves. NCCL carries out what one communicator was
given one after another, whoever the peer is: a receive that was begun ahead would hold up this
rank's next send, and stages would wait for each other in a circle. So with NCCL and more than two
ranks each direction has three groups (`lane`), and in none of them a rank has more than one peer.
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
from plait.comm.board import Wait, described
from plait.comm.failures import naming
from plait.comm.watch import WATCH
from plait.errors import CommunicationError


@dataclass(frozen=True)
class Arriving:
    """Tensors in flight: read them after `wait`."""

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    source: int
    """The rank, of all, that sends them."""

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors, delivered."""
        with naming("message between pipeline stages"):
            for work, tensor in zip(self.works, self.tensors, strict=True):
                if not work.is_completed():
                    shape = described(tensor.shape, tensor.dtype)
                    with WATCH.waiting(
                        Wait("message", "pp", time.monotonic(), shape=shape, missing=(self.source,))
                    ):
                        work.wait()
                else:
                    work.wait()
        return self.tensors


def lane(source: int, destination: int) -> int:
    """Which of `cluster.mesh.LANES` the messages between two ranks take: neighbours by turns, the
    last and the first rank another.
    """
    low, high = sorted((source, destination))
    return low % 2 if high - low == 1 else LANES - 1


class Messenger:
    """Point-to-point messages of the ranks of one group. `rank` and the peers are ranks within the
    group.
    """

    def __init__(
        self, groups: Sequence[tuple[dist.ProcessGroup, dist.ProcessGroup]], *, device: torch.device
    ) -> None:
        """`groups`: to higher ranks and to lower ranks, of every lane, or one pair for all
        messages.
        """
        self.rank = dist.get_rank(groups[0][0])
        self.device = device
        self.sent_bytes = 0
        """Bytes of tensors sent so far, descriptions not counted."""
        self._groups = tuple(groups)
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._tag = 0
        """Messages of before and after a failure do not match."""
        self._lost: list[tuple[dist.Work, torch.Tensor]] = []
        self._begun = False

    def send(self, tensors: Iterable[torch.Tensor], *, to: int) -> None:
        """Begin to send; each tensor is a message of its own."""
        self.forget_delivered()
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            self.sent_bytes += whole.numel() * whole.element_size()
            self._sending.append((self._isend(whole, to), whole))

    def receive(self, like: Sequence[tuple[torch.Size, torch.dtype]], *, source: int) -> Arriving:
        """Begin to receive tensors of the given shapes and dtypes."""
        buffers = tuple(
            torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in like
        )
        group = self._towards(source, self.rank)
        return Arriving(
            buffers,
            tuple(self._irecv(buffer, source) for buffer in buffers),
            dist.get_global_rank(group, source),
        )

    def send_object(self, value: object, *, to: int) -> None:
        """Send what can be pickled. Both sides are this program."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.device)
        length = torch.tensor([data.numel()], dtype=torch.int64, device=self.device)
        for tensor in (length, data):
            self._sending.append((self._isend(tensor, to), tensor))

    def receive_object(self, *, source: int) -> Any:
        """Wait for an object."""
        length = torch.empty(1, dtype=torch.int64, device=self.device)
        self._irecv(length, source).wait()
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._irecv(data, source).wait()
        return pickle.loads(data.cpu().numpy().tobytes())

    def forget_delivered(self) -> None:
        """Let go of what was sent and has arrived."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def finish(self) -> None:
        """Wait until everything sent is delivered."""
        with naming("messages between pipeline stages"):
            while self._sending:
                self._sending.popleft()[0].wait()
        self._begun = False

    def forget(self) -> None:
        """After a failure of all ranks: messages in flight are not waited for, and no later receive
        can match them.

        Raises CommunicationError for NCCL, which matches messages by their order alone.
        """
        if self._begun and dist.get_backend(self._groups[0][0]) != "gloo":
            raise CommunicationError(
                "the step of a pipeline failed while messages between its stages were in flight,"
                " which cannot be cancelled; start again from the last checkpoint"
            )
        self._lost.extend(self._sending)  # their memory must live until they are delivered
        self._sending.clear()
        self._tag += 1
        self._begun = False

    def _isend(self, tensor: torch.Tensor, to: int) -> dist.Work:
        self._begun = True
        work = dist.isend(tensor, group=self._towards(self.rank, to), group_dst=to, tag=self._tag)
        assert work is not None
        return work

    def _irecv(self, buffer: torch.Tensor, source: int) -> dist.Work:
        self._begun = True
        work = dist.irecv(
            buffer, group=self._towards(source, self.rank), group_src=source, tag=self._tag
        )
        assert work is not None
        return work

    def _towards(self, source: int, destination: int) -> dist.ProcessGroup:
        up, down = self._groups[lane(source, destination) if len(self._groups) > 1 else 0]
        return up if destination > source else down
