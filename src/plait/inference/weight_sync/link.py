"""`WeightSender` and `WeightReceiver`: from a trainer's ranks to those of a generator, which were launched apart.

Every version has a number, that both sides count. Every receiver says that it is ready; rank 0 of the trainer then lets all begin, or none;
pieces go over gloo, or straight from memory to memory of one machine; receivers compare hashes and say what they have; the sender returns
when all of them have everything.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, Self

import torch.distributed as dist

from plait.comm.peer_memory import Proof, proof, readable
from plait.errors import CommunicationError, InputError, PlaitError
from plait.inference.weight_sync.buffers import Buffers
from plait.inference.weight_sync.direct import Direct, tables_for
from plait.inference.weight_sync.holdings import NOTHING, Held, Side, holding_of, model_of, tensors_of
from plait.inference.weight_sync.meeting import GENERATOR, TRAINER, Meeting
from plait.inference.weight_sync.messages import messages_of
from plait.inference.weight_sync.route import pieces_of
from plait.inference.weight_sync.status import ReceivedWeights, check_newer, note, received_weights
from plait.inference.weight_sync.transfer import Moved, Verification, check_verification, content_of, move

TIMEOUT = 4.0
"""Seconds that a rank waits for another one's next sign before it names it."""
CONNECTING = 120.0


class _End:
    """What both ends share."""

    def __init__(self, owner: Any, address: str, role: str, timeout: float, connect_timeout: float) -> None:
        model = model_of(owner)
        if model is None:
            raise InputError("give a model: an engine, what plait.parallelize returned, or a torch.nn.Module")
        if timeout <= 0 or connect_timeout <= 0:
            raise InputError(f"timeout = {timeout} and connect_timeout = {connect_timeout} are seconds, and have to be more than 0")
        self._model, self._role, self._timeout = model, role, timeout
        self._rank, self._world = _place(owner)
        self._holding = holding_of(tensors_of(model, "source" if role == TRAINER else "target"))
        self._meeting = Meeting(address, role=role, rank=self._rank, timeout=timeout, connect_timeout=connect_timeout)
        self._number = self._attempt = 0
        """Of the next version, and of attempts to send it."""
        self._broken = ""

    def _join(self, generators: int, connect_timeout: float) -> None:
        ends = []
        trainers = self._meeting.registered(TRAINER, 0, connect_timeout)["world"]
        for role, count in ((TRAINER, trainers), (GENERATOR, generators)):
            rows = [self._meeting.registered(role, rank, connect_timeout) for rank in range(count)]
            if {row["world"] for row in rows} != {count}:
                raise InputError(f"receivers = {generators} and the generator has {rows[0]['world']} ranks; give their number")
            ends.append([{name: Held.of_json(held) for name, held in row["holds"].items()} for row in rows])
        self._counts = trainers, generators
        mine = ("source" if self._role == TRAINER else "target", self._rank)
        self._messages, self._buffers = messages_of(pieces_of(*ends, same_ranks=False, mine=[mine])), Buffers()
        with readable():
            self._meeting.connect(trainers, generators)
            self._channel = self._direct(connect_timeout)

    def _direct(self, connect_timeout: float) -> Direct:
        """Every rank looks whose memory it can read of those that it has messages with, and says so."""
        other = GENERATOR if self._role == TRAINER else TRAINER
        peers = sorted({message.target if self._role == TRAINER else message.source for message in self._messages})
        tables = tables_for({peer: Proof(**self._meeting.registered(other, peer, connect_timeout)["proof"]) for peer in peers})
        self._meeting.tell(f"tables/{self._role}/{self._rank}", {peer: table.told() for peer, table in tables.items()})
        keys = {f"tables/{other}/{peer}": f"{other} {peer}" for peer in peers}
        told = zip(peers, self._meeting.ask(keys, connect_timeout, "has not connected"), strict=True)
        return Direct(self._meeting, tables, {peer: found[str(self._rank)] for peer, found in told if str(self._rank) in found})

    def _register(self, **more: Any) -> None:
        holds = {name: held.to_json() for name, held in self._holding.items()}
        self._meeting.register({"world": self._world, "holds": holds, "proof": proof().to_json(), **more})

    def _tensors(self) -> Side:
        if self._broken:
            raise CommunicationError(f"this connection ended: {self._broken}; connect both sides anew")
        found = tensors_of(self._model, "source" if self._role == TRAINER else "target")
        if holding_of(found) != self._holding:
            raise InputError("the model is laid out otherwise than when it was connected; connect both sides anew")
        return Side(found, self._holding)

    def _move(self, side: Side, verify: Verification) -> Moved:
        sends = self._role == TRAINER
        with readable(), self._channel:
            return move(
                self._messages,
                side if sends else NOTHING,
                NOTHING if sends else side,
                self._channel,
                source=self._rank if sends else None,
                target=None if sends else self._rank,
                verify=verify,
                buffers=self._buffers,
            )

    def _key(self, what: str) -> str:
        return f"{self._number}/{what}"

    def close(self) -> None:
        """End the connection."""
        self._broken = "it was closed"
        self._meeting.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WeightSender(_End):
    """The trainer's end. Every rank of the trainer makes one, and calls `send` together with the others."""

    def __init__(self, source: Any, address: str, *, receivers: int, timeout: float = TIMEOUT, connect_timeout: float = CONNECTING) -> None:
        """`source`: an engine, what `plait.parallelize` returned, or a module. `address`: HOST:PORT where rank 0 of the trainer listens.
        `receivers`: ranks of the generator. `timeout`: seconds after which a rank that gives no sign is named. Returns when all are
        connected; raises CommunicationError where they are not within `connect_timeout` seconds, InputError where the models differ."""
        if isinstance(receivers, bool) or not isinstance(receivers, int) or receivers < 1:
            raise InputError(f"receivers = {receivers!r} must be the number of the generator's ranks")
        super().__init__(source, address, TRAINER, timeout, connect_timeout)
        self._register(receivers=receivers)
        self._version: int | None = None
        self._old: list[str] = []
        self._join(receivers, connect_timeout)

    def send(self, *, version: int | None = None, verify: Verification = "hashes") -> ReceivedWeights:
        """Send the weights as `version`, which has to grow (by default the last one + 1, from 0). Collective over the trainer.

        `verify` is that of `sync_weights`. Raises CommunicationError, on every rank, that names a receiver which does not ask for weights
        within `timeout` seconds (it still generates, or is gone): nothing has changed, and `send` may be called again. Where a receiver
        ends or stops in the middle, or did not get what was sent, the connection has ended. Raises InputError for a stale version, or ranks
        with different ones.
        """
        began = time.perf_counter()
        check_verification(verify)
        sources = self._tensors()
        number = version if version is not None else 0 if self._version is None else self._version + 1
        self._agree(number, verify)
        _, generators = self._counts
        try:
            moved = self._move(sources, verify)
            if verify == "content":
                self._meeting.tell(self._key(f"counted/{self._rank}"), bytes(moved.counted).hex())
            keys = {self._key(f"done/{rank}"): f"{GENERATOR} {rank}" for rank in range(generators)}
            ends = self._meeting.ask(keys, self._timeout, "did not say that it has the weights")
            refused = [f"{GENERATOR} {rank}: {end['error']}" for rank, end in enumerate(ends) if end["error"]]
            if refused:
                raise CommunicationError("; ".join(refused))
        except CommunicationError as error:
            self._broken = str(error)
            raise
        finally:
            self._end_together()
        self._version = number
        if not self._rank:
            self._forget()
        self._number, self._attempt = self._number + 1, 0
        size = sum(piece.size for message in self._messages for piece in message.pieces)
        return ReceivedWeights(number, ends[0]["content"], size, time.perf_counter() - began)

    def _end_together(self) -> None:
        """Rank 0 keeps the store, so it is the last to leave: else the others would hear that it is gone, and not what is wrong."""
        with suppress(CommunicationError):
            if self._rank:
                self._meeting.tell(self._key(f"ended/{self._rank}"), True)
            else:
                keys = {self._key(f"ended/{rank}"): f"{TRAINER} {rank}" for rank in range(1, self._counts[0])}
                self._meeting.ask(keys, 0.5 if self._broken else self._timeout, "did not end")

    def _forget(self) -> None:
        """What was told for the version before this one, which all ranks have ended."""
        trainers, generators = self._counts
        self._old, old = self._keys_of_attempts(trainers), self._old
        self._old += [self._key("go"), *(self._key(f"{what}/{rank}") for what in ("counted", "ended") for rank in range(trainers))]
        self._old += [self._key(f"{what}/{rank}") for what in ("ready", "done") for rank in range(generators)]
        self._meeting.forget(old)

    def _keys_of_attempts(self, trainers: int) -> list[str]:
        attempts = range(1, self._attempt + 1)
        offers = [self._key(f"offer/{attempt}/{rank}") for attempt in attempts for rank in range(1, trainers)]
        return offers + [self._key(f"decision/{attempt}") for attempt in attempts]

    def _agree(self, version: int, verify: str) -> None:
        """All begin, or none: rank 0 looks, and tells the others."""
        trainers, generators = self._counts
        self._attempt += 1
        decision, offer = self._key(f"decision/{self._attempt}"), self._key(f"offer/{self._attempt}")
        if self._rank:
            self._meeting.tell(f"{offer}/{self._rank}", [version, verify])
            found = self._meeting.ask({decision: f"{TRAINER} 0"}, self._timeout + 1, "did not call send")[0]
        else:
            found = {"error": "", "kind": ""}
            try:
                check_newer(version, None if self._version is None else ReceivedWeights(self._version, "", 0, 0.0))
                began = time.monotonic()
                keys = {f"{offer}/{rank}": f"{TRAINER} {rank}" for rank in range(1, trainers)}
                for rank, other in enumerate(self._meeting.ask(keys, self._timeout, "did not call send"), start=1):
                    if other != [version, verify]:
                        raise InputError(f"{TRAINER} {rank} sends version {other[0]}, verify {other[1]}; rank 0 {version}, {verify}")
                left = max(self._timeout - (time.monotonic() - began), 0.1)
                keys = {self._key(f"ready/{rank}"): f"{GENERATOR} {rank}" for rank in range(generators)}
                for rank, has in enumerate(self._meeting.ask(keys, left, "did not call receive (it still generates, or hangs)")):
                    if version <= has:
                        raise InputError(
                            f"version = {version} is stale: {GENERATOR} {rank} has version {has} already; versions have to grow"
                        )
            except PlaitError as error:
                found = {"error": str(error), "kind": type(error).__name__}
            self._meeting.tell(decision, found)
            if not found["error"]:
                self._meeting.tell(self._key("go"), {"version": version, "verify": verify})
        if found["error"]:
            raise (InputError if found["kind"] == "InputError" else CommunicationError)(found["error"])


class WeightReceiver(_End):
    """The generator's end. Every rank of the generator makes one, and calls `receive` together with the others."""

    def __init__(self, target: Any, address: str, *, timeout: float = TIMEOUT, connect_timeout: float = CONNECTING) -> None:
        """As `WeightSender`; `address` is the trainer's."""
        super().__init__(target, address, GENERATOR, timeout, connect_timeout)
        self._register()
        wanted = self._meeting.registered(TRAINER, 0, connect_timeout)["receivers"]
        if wanted != self._world:
            raise InputError(f"the trainer has receivers = {wanted}, and this generator has {self._world} ranks")
        self._join(self._world, connect_timeout)

    def receive(self, *, wait: float | None = None) -> ReceivedWeights:
        """Say that this rank is ready, and take the next version when it comes, within `wait` seconds (None: however long it takes).
        Collective over the generator. Raises CommunicationError where the trainer is gone, stops in the middle, or something else arrived
        than was sent; `generate` then refuses the model until it has received weights again."""
        targets = self._tensors()
        before = received_weights(self._model)
        self._meeting.tell(self._key(f"ready/{self._rank}"), before.version if before is not None and before.is_complete else -1)
        go = self._meeting.ask({self._key("go"): f"{TRAINER} 0"}, wait, "sent no weights")[0]
        began = time.perf_counter()
        version, verify = go["version"], go["verify"]
        trainers, _ = self._counts
        try:
            check_newer(version, before)
            note(self._model, ReceivedWeights(version, "", 0, 0.0, is_complete=False))
            moved, content = self._move(targets, verify), ""
            if verify == "content":
                keys = {self._key(f"counted/{rank}"): f"{TRAINER} {rank}" for rank in range(trainers)}
                counted = self._meeting.ask(keys, self._timeout, "did not say what it sent")
                content = content_of(map(bytes.fromhex, counted))
        except PlaitError as error:
            self._broken = str(error)
            with suppress(CommunicationError):  # whoever would read it may be gone
                self._meeting.tell(self._key(f"done/{self._rank}"), {"error": str(error), "content": ""})
            raise
        self._meeting.tell(self._key(f"done/{self._rank}"), {"error": "", "content": content})
        self._number += 1
        return note(self._model, ReceivedWeights(version, content, moved.bytes, time.perf_counter() - began))


def _place(owner: Any) -> tuple[int, int]:
    """(rank, ranks) of a model's run; one process for a plain module outside of any."""
    mesh = getattr(owner, "mesh", None)
    if mesh is not None:
        return mesh.rank, mesh.layout.world_size
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
