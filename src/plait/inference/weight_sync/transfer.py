"""Messages on their way: a few at a time, each hashed where it leaves and where it lies in the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import xxhash

from plait._torch.dtensor import local_tensor
from plait.checkpoint.content import ContentHash, pieces
from plait.checkpoint.windows import inside
from plait.errors import CommunicationError, InputError
from plait.inference.weight_sync.holdings import Side
from plait.inference.weight_sync.messages import Message
from plait.inference.weight_sync.route import PIECE, Piece

Verification = Literal["hashes", "content", "off"]
VERIFICATIONS: tuple[Verification, ...] = ("hashes", "content", "off")
IN_FLIGHT = 16 * PIECE
"""Bytes that a rank has on their way at most, beside the models."""
IN_CACHE = 512 << 10
"""Bytes that are copied inside of a rank before they are hashed."""
DIGEST = 16
"""Bytes of a hash: XXH3 of 128 bits."""


class Channel(Protocol):
    """What carries bytes to other ranks. Both calls start a message, and keep its tensor; the result waits for its end, and raises where
    there is none."""

    device: torch.device
    """Where its tensors lie."""

    def send(self, tensor: torch.Tensor, target: int) -> Callable[[], None]: ...

    def receive(self, tensor: torch.Tensor, source: int) -> Callable[[], None]: ...


class Buffers:
    """Flat memory for messages whose pieces do not lie in one stretch; kept from one version to the next, as the kernel takes as long to
    give new memory as a copy takes."""

    def __init__(self) -> None:
        self._free: dict[torch.device, list[torch.Tensor]] = {}

    def take(self, device: torch.device) -> torch.Tensor:
        """[PIECE], uint8."""
        free = self._free.get(device)
        return free.pop() if free else torch.empty(PIECE, dtype=torch.uint8, device=device)

    def put_back(self, buffer: torch.Tensor) -> None:
        """It may be taken again."""
        self._free.setdefault(buffer.device, []).append(buffer)


@dataclass
class Moved:
    """What a rank has sent and received."""

    bytes: int = 0
    """Received, or copied on the rank."""
    counted: ContentHash = field(default_factory=ContentHash)
    """This rank's part of the content hash."""


def check_verification(verify: object) -> None:
    """Raise InputError for a word that is none."""
    if verify not in VERIFICATIONS:
        raise InputError(f"verify = {verify!r} must be one of {', '.join(VERIFICATIONS)}")


def move(
    messages: Sequence[Message],
    sources: Side,
    targets: Side,
    channel: Channel,
    *,
    source: int | None,
    target: int | None,
    verify: Verification,
    buffers: Buffers,
) -> Moved:
    """Carry out a route. `source`, `target`: this rank's number among those that have and that get the weights, None where it is none of
    them. Memory for IN_FLIGHT bytes is needed beside the models. Raises CommunicationError where something else lies in the end in
    `targets` than left from a source."""
    transfer = _Transfer(sources, targets, channel, source, target, verify, buffers)
    inside = deque(message for message in messages if message.source == source and message.target == target)
    with torch.no_grad():
        for message in messages:
            if message.source != source or message.target != target:
                transfer.start(message)
                while transfer.on_the_way > IN_FLIGHT:
                    if inside:
                        transfer.copy(inside.popleft())
                    transfer.end_first()
        while inside:
            transfer.copy(inside.popleft())
        transfer.end()
    return transfer.moved


def content_of(counted: Iterable[bytes]) -> str:
    """The content hash, of what every source rank has counted."""
    content = ContentHash()
    for one in counted:
        content.add(one)
    return str(content)


class _Transfer:
    """Of one rank and one version."""

    def __init__(
        self,
        sources: Side,
        targets: Side,
        channel: Channel,
        source: int | None,
        target: int | None,
        verify: Verification,
        buffers: Buffers,
    ) -> None:
        self._sources, self._targets = _Parts(sources), _Parts(targets)
        self._channel, self._source, self._target, self._buffers = channel, source, target, buffers
        self._hashes, self._counts = verify != "off", verify == "content"
        self._left: dict[tuple[int, int], Any] = {}
        self._arrived: dict[tuple[int, int], Any] = {}
        """Hashes of all that went from a source to a target."""
        self._pairs: set[tuple[int, int]] = set()
        """Of this rank with others."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self.on_the_way = 0
        self.moved = Moved()

    def start(self, message: Message) -> None:
        """Of the route's next one, from or to another rank."""
        self._pairs.add((message.source, message.target))
        self._waiting.append((message.size, self._send(message) if message.source == self._source else self._receive(message)))
        self.on_the_way += message.size

    def copy(self, message: Message) -> None:
        """From this rank's source to its target."""
        for piece in message.pieces:
            self._copy(piece)

    def end(self) -> None:
        """Wait for all, and compare hashes with the other ranks."""
        theirs: dict[tuple[int, int], torch.Tensor] = {}
        for source, target in sorted(self._pairs) if self._hashes else ():
            if source == self._source:
                digest = torch.frombuffer(bytearray(self._left[source, target].digest()), dtype=torch.uint8)
                self._waiting.append((0, self._channel.send(digest.to(self._channel.device), target)))
            else:
                theirs[source, target] = torch.empty(DIGEST, dtype=torch.uint8, device=self._channel.device)
                self._waiting.append((0, self._channel.receive(theirs[source, target], source)))
        while self._waiting:
            self.end_first()
        for pair, hashed in self._arrived.items():
            sent = bytes(theirs[pair].cpu().numpy()) if pair in theirs else self._left[pair].digest()
            if sent != hashed.digest():
                raise CommunicationError(
                    f"what arrived from rank {pair[0]} of the source has the hash {hashed.hexdigest()}, and what was sent {sent.hex()}; "
                    "the weights are not used"
                )

    def end_first(self) -> None:
        """Wait for the oldest message."""
        size, end = self._waiting.popleft()
        end()
        self.on_the_way -= size

    def _copy(self, piece: Piece) -> None:
        pair, given, place = (piece.source, piece.target), self._sources.of(piece), self._targets.of(piece)
        blocks = [(given, place)]
        if self._hashes and given.is_contiguous() and place.is_contiguous():
            flat, size = (given.reshape(-1), place.reshape(-1)), IN_CACHE // place.element_size()
            blocks = list(zip(*(one.split(size) for one in flat), strict=True))
        for left, arrived in blocks:
            arrived.copy_(left)
            if self._hashes:
                self._hash(self._left, pair, left.to(arrived.dtype))
                self._hash(self._arrived, pair, arrived)
        self._count(piece, given)
        self.moved.bytes += piece.size

    def _send(self, message: Message) -> Callable[[], None]:
        pair, given = (message.source, message.target), [self._sources.of(piece) for piece in message.pieces]
        for piece, values in zip(message.pieces, given, strict=True):
            self._count(piece, values)
        taken, sent = None, self._direct(message, given)
        if sent is None:
            taken = self._buffers.take(self._channel.device)
            sent = taken[: message.size]
        for values, place in zip(given, given if taken is None else _places_in(taken, message), strict=True):
            if taken is not None:
                place.copy_(values)
            if self._hashes:
                self._hash(self._left, pair, place)
        return self._ended(self._channel.send(sent, message.target), taken)

    def _receive(self, message: Message) -> Callable[[], None]:
        pair, places = (message.source, message.target), [self._targets.of(piece) for piece in message.pieces]
        taken, received = None, self._direct(message, places)
        if received is None:
            taken = self._buffers.take(self._channel.device)
            received = taken[: message.size]
        wait = self._channel.receive(received, message.source)

        def end() -> None:
            wait()
            if taken is not None:
                for place, values in zip(places, _places_in(taken, message), strict=True):
                    place.copy_(values)
            self.moved.bytes += sum(piece.size for piece in message.pieces)
            if self._hashes:
                for place in places:
                    self._hash(self._arrived, pair, place)

        return self._ended(end, taken)

    def _ended(self, wait: Callable[[], None], taken: torch.Tensor | None) -> Callable[[], None]:
        def end() -> None:
            wait()
            if taken is not None:
                self._buffers.put_back(taken)

        return end

    def _direct(self, message: Message, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The bytes of a message where they lie, if they do so in one stretch; else None."""
        part, piece = parts[0], message.pieces[0]
        if len(parts) > 1 or not part.is_contiguous() or part.device != self._channel.device or part.dtype != _dtype(piece):
            return None
        return part.reshape(-1).view(torch.uint8)

    def _hash(self, states: dict[tuple[int, int], Any], pair: tuple[int, int], values: torch.Tensor) -> None:
        state = states.get(pair)
        if state is None:
            state = states[pair] = xxhash.xxh3_128()
        state.update(memoryview(values.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()))  # type: ignore[arg-type]

    def _count(self, piece: Piece, given: torch.Tensor) -> None:
        if not (self._counts and piece.is_counted):
            return
        observe = self.moved.counted.observer(piece.name, piece.record, piece.window, begins=not any(start for start, _ in piece.window))
        for block in pieces(piece.name, given.to(_dtype(piece))):
            observe(block)


def _dtype(piece: Piece) -> torch.dtype:
    """On the way."""
    found: torch.dtype = getattr(torch, piece.record.dtype)
    return found


class _Parts:
    """Views of what a rank holds."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._local: dict[str, torch.Tensor] = {}

    def of(self, piece: Piece) -> torch.Tensor:
        """In the shape of the piece."""
        local, window = self._local.get(piece.name), self._side.holding[piece.name].window
        if local is None:
            local = self._local[piece.name] = local_tensor(self._side.tensors[piece.name]).detach()
        return local if piece.window == window else local[inside(piece.window, window)]


def _places_in(buffer: torch.Tensor, message: Message) -> list[torch.Tensor]:
    """Of each piece of a message."""
    return [
        buffer[start : start + piece.size].view(_dtype(piece)).view([size for _, size in piece.window])
        for start, piece in zip(message.starts, message.pieces, strict=True)
    ]
