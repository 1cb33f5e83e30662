"""Messages on their way: as many at a time as there is memory for, each hashed where it left and where it arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import xxhash

from plait._torch.dtensor import local_tensor
from plait.checkpoint.content import ContentHash, pieces
from plait.errors import CommunicationError, InputError
from plait.inference.weight_sync.buffers import Buffers
from plait.inference.weight_sync.copies import SOME, copy
from plait.inference.weight_sync.holdings import Side
from plait.inference.weight_sync.messages import Message
from plait.inference.weight_sync.route import PIECE, Piece

Verification = Literal["hashes", "content", "off"]
VERIFICATIONS: tuple[Verification, ...] = ("hashes", "content", "off")
STAGED = 8 * PIECE
"""Bytes of buffers that a rank has on their way at most, in each direction, beside the models."""
DIGEST = 16
"""Bytes of a hash: XXH3 of 128 bits."""


class Channel(Protocol):
    """What carries bytes to other ranks. Both calls start a message, and keep its tensor; the result waits for its end, and raises where
    there is none."""

    device: torch.device
    """Where its tensors lie."""
    in_order: bool
    """Whether two ranks have to start all their messages in one order, as a message keeps those behind it from beginning; else those to a
    rank are in one order, and those from it."""

    def send(self, tensor: torch.Tensor, target: int) -> Callable[[], None]: ...

    def receive(self, tensor: torch.Tensor, source: int) -> Callable[[], None]: ...

    def is_here(self, tensor: torch.Tensor, source: int) -> bool:
        """Whether the next message, for `tensor`, can be had without waiting; True where nobody can tell."""


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
    them. Memory for 2 x STAGED bytes is needed beside the models. Raises CommunicationError where something else lies in the end in
    `targets` than left from a source."""
    transfer = _Transfer(sources, targets, channel, source, target, verify, buffers)
    with torch.no_grad():
        transfer.run(messages)
        transfer.compare()
    return transfer.moved


def content_of(counted: Iterable[bytes]) -> str:
    """The content hash, of what every source rank has counted."""
    content = ContentHash()
    for one in counted:
        content.add(one)
    return str(content)


@dataclass
class _Lane:
    """Messages that start in their order."""

    ahead: deque[Message]
    """Not started yet."""
    held: int = 0
    """Bytes of memory for those on their way."""
    parts: list[torch.Tensor] | None = None
    """Of the first one ahead, which waits for memory."""


@dataclass
class _Started:
    """A message on its way."""

    lane: _Lane
    held: int
    flat: torch.Tensor
    """Its bytes, where they lie on this side."""
    buffer: torch.Tensor | None
    """That they lie in; None where they lie in the model."""
    wait: Callable[[], None]


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
        self._one_in = {"off": 0, "hashes": SOME, "content": 1}[verify]
        self._states: dict[tuple[int, int], Any] = {}
        """Hashes of all that goes from a source to a target, of this rank with others."""
        self._wrong: list[str] = []
        """Tensors that are not what they were copied from."""
        self.moved = Moved()

    def run(self, messages: Sequence[Message]) -> None:
        """Start messages as early as there is memory for them, and take what arrives in the order that all ranks share; what leaves is
        waited for where its memory is needed. So the first message that has not arrived anywhere has started at both of its ends: those
        before it have arrived, and hold no memory that a rank could not have back. Copies inside of the rank are made between."""
        inside = deque(message for message in messages if message.source == self._source and message.target == self._target)
        between = [message for message in messages if message.source != self._source or message.target != self._target]
        if self._channel.in_order:
            lanes = [_Lane(deque(between))]
        else:
            lanes = [_Lane(deque(m for m in between if (m.source == self._source) == sends)) for sends in (False, True)]
        started: dict[int, _Started] = {}
        leaves: deque[_Started] = deque()
        for left, message in zip(range(len(between), 0, -1), between, strict=True):
            self._start(lanes, started)
            while id(message) not in started:
                self._leave(leaves.popleft())
                self._start(lanes, started)
            for _ in range(-(-len(inside) // left)):
                self._copy(inside.popleft())
            one = started.pop(id(message))
            if message.source == self._source:
                leaves.append(one)
                continue
            while inside and not self._channel.is_here(one.flat, message.source):
                self._copy(inside.popleft())
            self._take(message, one)
        for message in inside:
            self._copy(message)
        for one in leaves:
            self._leave(one)

    def compare(self) -> None:
        """Hashes with the other ranks."""
        ends, theirs = [], {}
        for pair, state in sorted(self._states.items(), key=lambda item: item[0]):
            if pair[0] == self._source:
                digest = torch.frombuffer(bytearray(state.digest()), dtype=torch.uint8)
                ends.append(self._channel.send(digest.to(self._channel.device), pair[1]))
            else:
                theirs[pair] = torch.empty(DIGEST, dtype=torch.uint8, device=self._channel.device)
                ends.append(self._channel.receive(theirs[pair], pair[0]))
        for end in ends:
            end()
        for pair, digest in theirs.items():
            sent, found = bytes(digest.cpu().numpy()), self._states[pair]
            if sent != found.digest():
                raise CommunicationError(
                    f"what arrived from rank {pair[0]} of the source has the hash {found.hexdigest()}, and what was sent {sent.hex()}; "
                    "the weights are not used"
                )
        if self._wrong:
            raise CommunicationError(
                f"{', '.join(self._wrong[:3])}: in the target lies something else than was copied there from the source, which must not "
                "change meanwhile; the weights are not used"
            )

    def _start(self, lanes: Sequence[_Lane], started: dict[int, _Started]) -> None:
        """Those that there is memory for."""
        for lane in lanes:
            self._start_in(lane, started)

    def _start_in(self, lane: _Lane, started: dict[int, _Started]) -> None:
        while lane.ahead:
            message = lane.ahead[0]
            sends = message.source == self._source
            parts = lane.parts or [(self._sources if sends else self._targets).of(piece) for piece in message.pieces]
            flat, buffer = self._direct(message, parts), None
            held = PIECE if flat is None or self._channel.in_order else 0
            if lane.held + held > STAGED:
                lane.parts = parts
                return
            lane.ahead.popleft()
            lane.parts = None
            lane.held += held
            if flat is None:
                buffer = self._buffers.take(self._channel.device)
                flat = buffer[: message.size]
            if sends:
                for piece, values in zip(message.pieces, parts, strict=True):
                    self._count(piece, values)
                for values, place in zip(parts, _places_in(flat, message), strict=True) if buffer is not None else ():
                    place.copy_(values)
                self._hash(message, flat)
                wait = self._channel.send(flat, message.target)
            else:
                wait = self._channel.receive(flat, message.source)
            started[id(message)] = _Started(lane, held, flat, buffer, wait)

    def _take(self, message: Message, one: _Started) -> None:
        """Wait for what arrives, hash it while a core still has it in its cache, and put it where it belongs."""
        one.wait()
        self._hash(message, one.flat)
        self.moved.bytes += sum(piece.size for piece in message.pieces)
        for piece, values in zip(message.pieces, _places_in(one.flat, message), strict=True) if one.buffer is not None else ():
            self._put(piece, values)
        self._free(one)

    def _leave(self, one: _Started) -> None:
        """Wait for what leaves."""
        one.wait()
        self._free(one)

    def _free(self, one: _Started) -> None:
        """Another message may have its memory."""
        if one.buffer is not None:
            self._buffers.put_back(one.buffer)
        one.lane.held -= one.held

    def _copy(self, message: Message) -> None:
        """From this rank's source to its target."""
        for piece in message.pieces:
            given = self._sources.of(piece)
            self._put(piece, given)
            self._count(piece, given)
            self.moved.bytes += piece.size

    def _put(self, piece: Piece, values: torch.Tensor) -> None:
        if not copy(values, self._targets.of(piece), self._buffers, one_in=self._one_in):
            self._wrong.append(piece.name)

    def _direct(self, message: Message, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The bytes of a message where they lie, if they do so in one stretch; else None."""
        part, piece = parts[0], message.pieces[0]
        if len(parts) > 1 or not part.is_contiguous() or part.device != self._channel.device or part.dtype != _dtype(piece):
            return None
        return part.reshape(-1).view(torch.uint8)

    def _hash(self, message: Message, flat: torch.Tensor) -> None:
        if not self._hashes:
            return
        pair = message.source, message.target
        state = self._states.get(pair)
        if state is None:
            state = self._states[pair] = xxhash.xxh3_128()
        state.update(memoryview(flat.cpu().numpy()))  # type: ignore[arg-type]

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
        found = self._local.get(piece.name)
        if found is None:
            found = self._local[piece.name] = local_tensor(self._side.tensors[piece.name]).detach()
        for dim, (part, held) in enumerate(zip(piece.window, self._side.holding[piece.name].window, strict=True)):
            if part != held:
                found = found.narrow(dim, part[0] - held[0], part[1])
        return found


def _places_in(buffer: torch.Tensor, message: Message) -> list[torch.Tensor]:
    """Of each piece of a message."""
    return [
        buffer[start : start + piece.size].view(_dtype(piece)).view([size for _, size in piece.window])
        for start, piece in zip(message.starts, message.pieces, strict=True)
    ]
