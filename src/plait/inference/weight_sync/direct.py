"""Messages between ranks of one machine: the receiver reads them where they lie in the sender's memory, in one copy.

Two ranks each have a table for the other one, which reads it too: how many messages it has sent, and where the last of them lie, and how
many it has taken. So nothing but the small ones goes through the channel below, whose sockets copy twice and wake threads up.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self

import torch

from plait.comm.peer_memory import Proof, can_read, read
from plait.errors import CommunicationError
from plait.inference.weight_sync.transfer import Channel

SMALL = 16 << 10
"""Bytes of a message up to which it goes through the channel below."""
_AT_ONCE = 60
"""Messages to a rank that it has not taken yet, at most."""
_NONCE, _SENT, _TAKEN, _FAILED, _WHERE = range(5)
"""Words of a table: random ones; counts; whether it ended with an error; from the last one on, where messages lie."""
_YIELDING, _PAUSE = 500e-6, 50e-6
"""Seconds: a wait yields the core for so long, then sleeps."""
_KEPT: list[torch.Tensor] = []
"""A rank that is late may still read the table of one that is done."""


class Table:
    """Of this rank, for another one to read. On x86-64 who sees a count also sees what was written before it."""

    def __init__(self) -> None:
        words = torch.zeros(_WHERE + _AT_ONCE, dtype=torch.int64)
        _KEPT.append(words)
        self.words, self._start = words.numpy(), words.data_ptr()
        self.words[_NONCE] = secrets.randbits(62)

    def told(self) -> list[int]:
        """For the other one: the process, where the table lies, and its random word."""
        return [os.getpid(), self._start, int(self.words[_NONCE])]


def tables_for(proofs: Mapping[int, Proof]) -> dict[int, Table]:
    """One for each rank whose memory this one can read. To be called by all, which let the others read until all have told."""
    readable = platform.machine() in ("x86_64", "AMD64")
    return {rank: Table() for rank, proof in proofs.items() if readable and can_read(proof)}


class Below(Channel, Protocol):
    """The channel for all others."""

    timeout: float
    """Seconds that a rank waits for another one."""

    def named(self, rank: int, *, sends: bool) -> str:
        """A rank that sends or receives, for an error."""


class Direct:
    """A channel; on CPUs. Inside of it a rank that fails lets the others know."""

    def __init__(self, below: Below, tables: Mapping[int, Table], told: Mapping[int, list[int]]) -> None:
        """`tables`: of this rank, by the rank that reads it; `told`: what those have told of theirs for this one, where they can read."""
        self._below = below
        self._peers = {rank: _Peer(below, rank, table, *told[rank]) for rank, table in tables.items() if rank in told}
        self.device, self.in_order = below.device, below.in_order

    @property
    def ranks(self) -> Iterable[int]:
        """Those that it reaches without the channel below."""
        return self._peers.keys()

    def send(self, tensor: torch.Tensor, target: int) -> Callable[[], None]:
        """Returns what waits until `target` has read it."""
        peer = self._peers.get(target)
        return self._below.send(tensor, target) if peer is None or tensor.nbytes <= SMALL else peer.offer(tensor)

    def receive(self, tensor: torch.Tensor, source: int) -> Callable[[], None]:
        """Returns what reads it, once it is there."""
        peer = self._peers.get(source)
        return self._below.receive(tensor, source) if peer is None or tensor.nbytes <= SMALL else lambda: peer.take(tensor)

    def is_here(self, tensor: torch.Tensor, source: int) -> bool:
        """Whether the next message can be had without waiting, as far as this rank can tell."""
        peer = self._peers.get(source)
        return peer is None or tensor.nbytes <= SMALL or peer.is_here()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for peer in self._peers.values() if kind is not None else ():
            peer.fail()


class _Peer:
    """Another rank. Messages of a direction are taken in the order in which they were sent."""

    def __init__(self, below: Below, rank: int, table: Table, process: int, start: int, nonce: int) -> None:
        self._below, self._rank, self._own = below, rank, table.words
        self._process, self._start, self._nonce = process, start, nonce
        self._words = torch.zeros_like(torch.from_numpy(table.words))
        self._theirs = self._words.numpy()
        """Its table, as it was when this rank looked last."""

    def offer(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Let it read a tensor."""
        number = int(self._own[_SENT])
        self._until(_TAKEN, number - _AT_ONCE)
        self._own[_WHERE + number % _AT_ONCE] = tensor.data_ptr()
        self._own[_SENT] = number + 1

        def wait() -> None:
            self._until(_TAKEN, number)
            tensor.numel()  # kept until here

        return wait

    def take(self, tensor: torch.Tensor) -> None:
        """Read the next one."""
        number = int(self._own[_TAKEN])
        self._until(_SENT, number)
        try:
            read(self._process, int(self._theirs[_WHERE + number % _AT_ONCE]), tensor)
        except OSError as error:
            raise self._lost(_SENT, error.strerror) from None
        self._own[_TAKEN] = number + 1

    def is_here(self) -> bool:
        """Whether the next one can be read."""
        return self._theirs[_SENT] > self._own[_TAKEN] or self._has(_SENT, int(self._own[_TAKEN]))

    def fail(self) -> None:
        """It need not wait."""
        self._own[_FAILED] = 1

    def _until(self, count: int, number: int) -> None:
        """Wait until a count of its table is more than `number`."""
        if self._theirs[count] > number:
            return
        began = time.monotonic()
        while not self._has(count, number):
            waited = time.monotonic() - began
            if waited > self._below.timeout:
                raise self._lost(count, f"waited {waited:.0f} s")
            if waited > _YIELDING:
                time.sleep(_PAUSE)
            else:
                os.sched_yield()

    def _has(self, count: int, number: int) -> bool:
        try:
            read(self._process, self._start, self._words)
        except OSError as error:
            raise self._lost(count, error.strerror) from None
        if self._theirs[_NONCE] != self._nonce:
            raise self._lost(count, "its process is another one now")
        if self._theirs[count] > number:
            return True
        if self._theirs[_FAILED]:
            raise self._lost(count, "it failed")
        return False

    def _lost(self, count: int, why: Any) -> CommunicationError:
        sends = count == _SENT
        return CommunicationError(f"{self._below.named(self._rank, sends=sends)} {'sends' if sends else 'takes'} no weights: {why}")
