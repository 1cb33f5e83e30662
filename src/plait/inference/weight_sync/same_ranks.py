"""`sync_weights`: the weights of one model into another on the same ranks."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait._torch.groups import timeout_of
from plait.checkpoint.agreement import together
from plait.cluster import accelerator
from plait.comm.peer_memory import proof, readable
from plait.errors import CommunicationError, InputError
from plait.inference.weight_sync.buffers import Buffers
from plait.inference.weight_sync.direct import Direct, tables_for
from plait.inference.weight_sync.holdings import Holding, Side, holding_of, model_of, tensors_of
from plait.inference.weight_sync.messages import Message, messages_of
from plait.inference.weight_sync.route import pieces_of
from plait.inference.weight_sync.status import ReceivedWeights, check_newer, note, received_weights
from plait.inference.weight_sync.transfer import DIGEST, VERIFICATIONS, Moved, Verification, check_verification, content_of, move


@dataclass
class _Known:
    """Routes of layouts that were met before. They follow from what the ranks hold, so a hash of that finds them."""

    routes: dict[bytes, list[Message]] = field(default_factory=dict)
    channel: Direct | None = None
    """Between the ranks."""
    group: weakref.ref[Any] | None = None
    """In which they were met: ranks of another may be others."""
    buffers: Buffers = field(default_factory=Buffers)

    @property
    def state(self) -> bytes:
        """Equal on ranks that know the same."""
        return hashlib.blake2b(b"".join(self.routes) + bytes([self.channel is None]), digest_size=DIGEST).digest()

    def begin(self) -> None:
        """Before a call."""
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is not (None if self.group is None else self.group()):
            self.clear()
            self.group = None if group is None else weakref.ref(group)

    def clear(self) -> None:
        """Forget what was met."""
        self.routes.clear()
        self.channel = None

    def add(self, key: bytes, messages: list[Message]) -> list[Message]:
        """In place of the oldest one, where there are several already."""
        while len(self.routes) >= MOST_ROUTES:
            self.routes.pop(next(iter(self.routes)))
        self.routes[key] = messages
        return messages


_KNOWN = _Known()
MOST_ROUTES = 4


def sync_weights(source: Any, target: Any, *, version: int | None = None, verify: Verification = "hashes") -> ReceivedWeights | None:
    """Copy the weights of `source` into `target`, each on a layout of its own, over the same ranks; for a generator beside a trainer.

    Both are engines, what `plait.parallelize` returned, or plain modules; None on a rank that has none of it. Parameters and persistent
    buffers are copied, in the target's dtypes, a few MiB at a time: 64 MiB at most beside the two models. `version` grows with every call
    (by default by 1 from 0); a stale one is refused. With `verify="hashes"` two ranks compare hashes of what left one and arrived at the
    other, and each rank an eighth of what it copied, bit by bit; "content" compares all that is copied, and gives a hash that is equal on
    every layout; "off" compares nothing. Returns what the target has now (`version`, `content`, `bytes`, `seconds`); None on a rank without
    one.

    Collective over all ranks. Raises InputError on all of them where the models differ or the version is stale, and CommunicationError
    where something else arrived than was sent; the target is then refused by `generate` until a later call succeeds.
    """
    began = time.perf_counter()
    check_verification(verify)
    have, want = model_of(source), model_of(target)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = _device(world)
    _KNOWN.begin()
    agree = partial(together, device=device, doing="sync_weights")

    def prepared() -> _Prepared:
        before = received_weights(want) if want is not None else None
        found = version if version is not None else before.version + before.is_complete if before is not None else 0
        if want is not None:
            check_newer(found, before)
        if want is not None and want is have:
            raise InputError("source and target are one model")
        return _Prepared(_side(have, "source"), _side(want, "target"), found if want is not None or version is not None else -1)

    mine, brought = agree(prepared, lambda found: found.said(verify), raising=InputError)
    number = _agreed(brought)
    messages = _route(mine, [row[9:] for row in brought], rank, world, device, agree)
    if want is not None:
        note(want, ReceivedWeights(number, "", 0, 0.0, is_complete=False))
    channel = _KNOWN.channel
    assert channel is not None

    def moves() -> Moved:
        with readable(), channel:
            return move(messages, mine.sources, mine.targets, channel, source=rank, target=rank, verify=verify, buffers=_KNOWN.buffers)

    try:
        moved, counted = agree(moves, lambda found: bytes(found.counted), raising=CommunicationError)
    except CommunicationError:
        _KNOWN.clear()  # the ranks have taken different numbers of messages
        raise
    if want is None:
        return None
    content = content_of(row[:DIGEST] for row in counted) if verify == "content" else ""
    return note(want, ReceivedWeights(number, content, moved.bytes, time.perf_counter() - began))


NOBODY = "sync_weights: no rank has a target"


def _side(model: nn.Module | None, what: str) -> Side:
    tensors = tensors_of(model, what)
    return Side(tensors, holding_of(tensors))


@dataclass
class _Prepared:
    """What a rank has to move."""

    sources: Side
    targets: Side
    version: int
    """-1 for one that follows the others."""

    @property
    def holdings(self) -> tuple[Holding, Holding]:
        """Of the two sides."""
        return self.sources.holding, self.targets.holding

    def said(self, verify: Verification) -> bytes:
        """To the other ranks: version, how to verify, a hash of what it holds, and which routes it knows."""
        held = hashlib.blake2b(repr(self.holdings).encode(), digest_size=DIGEST).digest()
        return self.version.to_bytes(8, "little", signed=True) + bytes([VERIFICATIONS.index(verify)]) + held + _KNOWN.state


def _agreed(brought: Sequence[bytes]) -> int:
    """The version of all ranks."""
    versions = {int.from_bytes(row[:8], "little", signed=True) for row in brought} - {-1}
    if len(versions) != 1:
        raise InputError(f"sync_weights: the ranks have the versions {sorted(versions)}; give every rank the same" if versions else NOBODY)
    if len(ways := {row[8] for row in brought}) > 1:
        said = ", ".join(VERIFICATIONS[way] for way in sorted(ways))
        raise InputError(f"sync_weights: the ranks have verify = {said}; give every rank the same")
    return versions.pop()


def _route(mine: _Prepared, rows: Sequence[bytes], rank: int, world: int, device: torch.device, agree: Any) -> list[Message]:
    """What this rank sends and gets. `rows`: of every rank, a hash of what it holds, and of the routes that it knows. Collective."""
    key = hashlib.blake2b(b"".join(row[:DIGEST] for row in rows), digest_size=DIGEST).digest()
    if len({row[DIGEST : 2 * DIGEST] for row in rows}) > 1:
        _KNOWN.clear()
    if _KNOWN.channel is None:
        _KNOWN.channel = _channel(rank, world, device)
    if (known := _KNOWN.routes.get(key)) is not None:
        return known
    holdings = _of_all(mine.holdings, world)
    have, want = [row[0] for row in holdings], [row[1] for row in holdings]
    ends = (("source", rank), ("target", rank))
    route, _ = agree(lambda: pieces_of(have, want, same_ranks=True, mine=ends), raising=InputError)
    return _KNOWN.add(key, messages_of(route))


def _channel(rank: int, world: int, device: torch.device) -> Direct:
    """Collective: all let the others read their memory until all have tried."""
    if world == 1 or device.type != "cpu":
        return Direct(_Default(device), {}, {})
    with readable():
        proofs = _of_all(proof(), world)
        tables = tables_for({other: one for other, one in enumerate(proofs) if other != rank})
        told = _of_all({other: table.told() for other, table in tables.items()}, world)
    return Direct(_Default(device), tables, {other: found[rank] for other, found in enumerate(told) if rank in found})


def _device(world: int) -> torch.device:
    """Where the default group takes tensors, the same kind on every rank."""
    if world == 1 or accelerator.BACKEND not in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device(accelerator.NAME, torch.accelerator.current_device_index())


def _of_all(mine: Any, world: int) -> list[Any]:
    if world == 1:
        return [mine]
    rows: list[Any] = [None] * world
    dist.all_gather_object(rows, mine)
    return rows


class _Default:
    """Messages of the default group."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.in_order = device, device.type != "cpu"
        self.timeout = timeout_of(dist.group.WORLD) if dist.group.WORLD is not None else 0.0

    def send(self, tensor: torch.Tensor, target: int) -> Callable[[], None]:
        return _waiting(dist.isend(tensor, target), tensor)

    def receive(self, tensor: torch.Tensor, source: int) -> Callable[[], None]:
        return _waiting(dist.irecv(tensor, source), tensor)

    def is_here(self, tensor: torch.Tensor, source: int) -> bool:
        return True

    def named(self, rank: int, *, sends: bool) -> str:
        return f"rank {rank}"


def _waiting(work: dist.Work | None, tensor: torch.Tensor) -> Callable[[], None]:
    def wait() -> None:
        if work is not None:
            work.wait()
        tensor.numel()  # kept until here

    return wait
