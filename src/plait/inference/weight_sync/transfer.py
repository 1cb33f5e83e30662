"""Pieces on their way: a few at a time, each hashed where it leaves and where it lies in the end."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from plait._torch.dtensor import local_tensor
from plait.checkpoint.content import ContentHash, pieces
from plait.checkpoint.windows import Window, inside, window_of
from plait.errors import CommunicationError
from plait.inference.weight_sync.route import PIECE, Piece

Verification = Literal["full", "sums", "off"]
HashOf = Callable[[Piece, torch.Tensor], bytes]
IN_FLIGHT = 4 * PIECE
"""Bytes that a rank has on their way at most, beside the models."""


class Channel(Protocol):
    """What carries pieces to other ranks. Both calls start a message, and keep its tensor; the result waits for its end, and raises where
    there is none."""

    device: torch.device
    """Where its tensors lie."""

    def send(self, tensor: torch.Tensor, piece: Piece) -> Callable[[], None]: ...

    def receive(self, tensor: torch.Tensor, piece: Piece) -> Callable[[], None]: ...


@dataclass
class Moved:
    """What a rank has sent and received."""

    bytes: int = 0
    """Received, or copied on the rank."""
    sent: dict[int, ContentHash] = field(default_factory=dict)
    """By target rank."""
    received: ContentHash = field(default_factory=ContentHash)
    counted: ContentHash = field(default_factory=ContentHash)
    """This rank's part of the content hash."""


def move(
    route: Sequence[Piece],
    sources: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    channel: Channel,
    *,
    source: int | None,
    target: int | None,
    verify: Verification,
) -> Moved:
    """Carry out a route. `source`, `target`: this rank's number among those that have and that get the weights, None where it is none of
    them. Memory for IN_FLIGHT bytes is needed beside the models."""
    hash_of = HASHES[verify]
    moved, on_the_way, waiting = Moved(), 0, deque[tuple[int, Callable[[], None]]]()
    last: tuple[str, Window, bytes] | None = None

    def end_first() -> None:
        nonlocal on_the_way
        size, end = waiting.popleft()
        end()
        on_the_way -= size

    with torch.no_grad():
        for piece in route:
            leaves, arrives = piece.source == source, piece.target == target
            given = _part(sources[piece.name], piece.window) if leaves else None
            place = _part(targets[piece.name], piece.window) if arrives else None
            dtype: torch.dtype = getattr(torch, piece.record.dtype)
            if given is not None and place is not None:
                place.copy_(given)
            elif given is not None:
                staged = given.to(channel.device, dtype).contiguous()
                waiting.append((piece.size, channel.send(staged, piece)))
            elif place is not None:
                direct = place.is_contiguous() and place.device == channel.device
                buffer = place if direct else torch.empty(place.shape, dtype=dtype, device=channel.device)
                waiting.append((piece.size, _placed(moved, piece, buffer, place, channel.receive(buffer, piece), hash_of)))
            if given is not None and hash_of is not None:
                if last is None or last[:2] != (piece.name, piece.window):
                    last = piece.name, piece.window, hash_of(piece, given.to(dtype))
                moved.sent.setdefault(piece.target, ContentHash()).add(last[2])
                if piece.is_counted:
                    moved.counted.add(last[2])
            if given is not None and place is not None:
                moved.bytes += piece.size
                if hash_of is not None:
                    moved.received.add(hash_of(piece, place))
            else:
                on_the_way += piece.size
            while on_the_way > IN_FLIGHT:
                end_first()
        while waiting:
            end_first()
    return moved


def checked(received: ContentHash, sent: Iterable[bytes], counted: Iterable[bytes]) -> str:
    """The content hash, of what every source rank has `counted`. Raises CommunicationError where what was `received` is not what was
    `sent` here."""
    expected, content = ContentHash(), ContentHash()
    for one in sent:
        expected.add(one)
    for one in counted:
        content.add(one)
    if bytes(expected) != bytes(received):
        raise CommunicationError(f"what arrived has the hash {received}, and what was sent {expected}; the weights are not used")
    return str(content)


def _part(tensor: torch.Tensor, window: Window) -> torch.Tensor:
    """A view."""
    return local_tensor(tensor).detach()[inside(window, window_of(tensor))]


def _placed(
    moved: Moved, piece: Piece, buffer: torch.Tensor, place: torch.Tensor, wait: Callable[[], None], hash_of: HashOf | None
) -> Callable[[], None]:
    def end() -> None:
        wait()
        if buffer is not place:
            place.copy_(buffer)
        moved.bytes += piece.size
        if hash_of is not None:
            moved.received.add(hash_of(piece, place))

    return end


def _content(piece: Piece, values: torch.Tensor) -> bytes:
    found = ContentHash()
    observe = found.observer(piece.name, piece.record, piece.window, begins=not any(start for start, _ in piece.window))
    for block in pieces(piece.name, values):
        observe(block)
    return bytes(found)


def _sum(piece: Piece, values: torch.Tensor) -> bytes:
    """As fast as memory is read: a sum of the piece's words, times numbers of the piece's own. Finds what is missing, changed, of another
    version or in the place of another piece, and not values that changed places inside of a piece."""
    flat = values.contiguous().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    whole = flat.numel() // 8 * 8
    total = int(flat[:whole].view(torch.int64).sum()) + int(flat[whole:].sum())
    said = f"{piece.name}\0{piece.window}".encode()
    keys = np.frombuffer(hashlib.blake2b(said, digest_size=16).digest(), dtype="<u8") | np.uint64(1)
    return (keys * np.uint64(total & (1 << 64) - 1)).tobytes()


HASHES: Mapping[Verification, HashOf | None] = {"full": _content, "sums": _sum, "off": None}
"""Of a piece: 16 bytes, which are added up."""
