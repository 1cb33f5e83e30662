"""Where a trainer's ranks and a generator's meet: a store of torch's, whose values are JSON, and gloo between all of them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from plait._torch.groups import make_gloo
from plait.errors import CommunicationError, InputError

TRAINER, GENERATOR = "trainer rank", "generator rank"
_AT_ONCE = 1.0
"""Seconds that the store is asked to wait, after which signals are looked at."""
_LOOKS, _PAUSE = 15, 0.02


class Meeting:
    """Of one rank. All times in seconds."""

    def __init__(self, address: str, *, role: str, rank: int, timeout: float, connect_timeout: float) -> None:
        """Rank 0 of the trainer keeps the store. Raises InputError for an address that is none or cannot be used, CommunicationError where
        nobody keeps a store within `connect_timeout`."""
        self.role, self.rank, self.timeout = role, rank, timeout
        host, port = _parsed(address)
        keeps = role == TRAINER and rank == 0
        try:
            self._store = dist.TCPStore(
                host, port, is_master=keeps, wait_for_workers=False, timeout=timedelta(seconds=connect_timeout), use_libuv=True
            )
        except (RuntimeError, OSError) as error:
            said = str(error).splitlines()[0]
            if keeps:
                raise InputError(f"address = {address!r}: cannot listen there: {said}") from None
            raise CommunicationError(f"{address}: no trainer answered within {connect_timeout:g} s: {said}") from None
        self._where: dict[str, tuple[str, int]] = {}
        self._group: Any = None

    def tell(self, key: str, value: Any) -> None:
        """For the others to read."""
        with _Lost(self):
            self._store.set(key, json.dumps(value))

    def register(self, facts: Any) -> None:
        """Tell the others of this rank, and where it runs."""
        self.tell(f"{self.role}/{self.rank}", {"host": socket.gethostname(), "pid": os.getpid(), "facts": facts})

    def registered(self, role: str, rank: int, timeout: float) -> Any:
        """What another rank told of itself."""
        value = self.ask({f"{role}/{rank}": f"{role} {rank}"}, timeout, "has not connected")[0]
        self._where[f"{role} {rank}"] = value["host"], value["pid"]
        return value["facts"]

    def connect(self, trainers: int, generators: int) -> None:
        """Join all ranks, trainers first."""
        rank = self.rank if self.role == TRAINER else trainers + self.rank
        self._trainers = trainers
        with _Lost(self):
            prefix = dist.PrefixStore("messages", self._store)
            self._group = make_gloo(prefix, rank, trainers + generators, timedelta(seconds=self.timeout))
        self.device, self.in_order = torch.device("cpu"), False

    def ask(self, keys: dict[str, str], timeout: float | None, what: str) -> list[Any]:
        """The values of keys, by who tells them. Raises CommunicationError that names those who `what` within the time."""
        end = None if timeout is None else time.monotonic() + timeout
        with _Lost(self):
            while not self._arrived(list(keys), end):
                if end is not None and time.monotonic() >= end:
                    missing = [who for key, who in keys.items() if not self._store.check([key])]
                    raise CommunicationError(f"{', '.join(map(self._described, missing))} {what} within {timeout:g} s")
            return [json.loads(self._store.get(key)) for key in keys]

    def _arrived(self, keys: list[str], end: float | None) -> bool:
        """Whether all keys are there, after at most _AT_ONCE seconds."""
        left = _AT_ONCE if end is None else min(_AT_ONCE, end - time.monotonic())
        try:
            self._store.wait(keys, timedelta(seconds=max(left, 0.001)))
        except dist.DistStoreError:
            return self._store.check(keys)
        return True

    def forget(self, keys: Iterable[str]) -> None:
        """Drop what nobody reads any more."""
        with _Lost(self):
            for key in keys:
                self._store.delete_key(key)

    def _described(self, who: str) -> str:
        """With its process, and whether that is gone, where one can tell."""
        host, pid = self._where.get(who, ("", 0))
        if not pid:
            return who
        gone = host == socket.gethostname() and _ends(pid)
        return f"{who} ({host}, process {pid}{', which has ended' if gone else ''})"

    # ---- messages, as a channel of `transfer` ---------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, target: int) -> Callable[[], None]:
        """To the generator's rank."""
        return self._started(self._group.send, tensor, self._trainers + target, f"{GENERATOR} {target}", "takes no weights")

    def receive(self, tensor: torch.Tensor, source: int) -> Callable[[], None]:
        """From the trainer's rank."""
        return self._started(self._group.recv, tensor, source, f"{TRAINER} {source}", "sends no weights")

    def is_here(self, tensor: torch.Tensor, source: int) -> bool:
        """Nobody can tell."""
        return True

    def named(self, rank: int, *, sends: bool) -> str:
        """The other end's rank, with its process."""
        return self._described(f"{TRAINER if sends else GENERATOR} {rank}")

    def _started(self, start: Any, tensor: torch.Tensor, peer: int, who: str, what: str) -> Callable[[], None]:
        def failed(error: RuntimeError) -> CommunicationError:
            said = str(error).splitlines()[0].partition(" This is typically")[0]
            return CommunicationError(f"{self._described(who)} {what} (waited at most {self.timeout:g} s): {said}")

        try:
            work = start([tensor], peer, 0)
        except RuntimeError as error:
            raise failed(error) from None

        def wait() -> None:
            try:
                work.wait(timedelta(seconds=self.timeout))
            except RuntimeError as error:
                raise failed(error) from None
            tensor.numel()  # kept until here

        return wait

    def close(self) -> None:
        """Drop the connections."""
        self._group = self._store = None  # type: ignore[assignment]


class _Lost:
    """Says that the trainer's store is gone."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def __enter__(self) -> None:
        if self._meeting._store is None:
            raise InputError("this connection is closed; make a new one")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):  # DistNetworkError and DistStoreError are
            said = str(error).splitlines()[0]
            raise CommunicationError(f"{self._meeting._described(f'{TRAINER} 0')} no longer answers: {said}") from None


def _ends(pid: int) -> bool:
    """Whether a process of this machine has ended. One that is killed closes its connections a moment before."""
    for _ in range(_LOOKS):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except OSError:
            return True
        time.sleep(_PAUSE)
    return False


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"address = {address!r} must be HOST:PORT, of rank 0 of the trainer, such as 127.0.0.1:29600")
    return host, int(port)
