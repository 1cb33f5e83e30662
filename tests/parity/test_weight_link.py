"""Weights from a trainer's ranks to a generator that was launched apart: every value, versions, and ranks that are named in time."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import plait
from plait._torch.dtensor import local_tensor
from plait.checkpoint.windows import inside, window_of
from plait.errors import CommunicationError, InputError
from plait.inference.weight_sync import direct, link, meeting, status
from plait.inference.weight_sync.holdings import tensors_of
from tests.parity.two_models import LAYOUTS, built
from tests.pool import Pool, quick_starts


def free_address() -> str:
    """Where nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Runs it in a thread; the result is called for its result."""
    ends: list[Any] = []

    def run() -> None:
        try:
            ends.append((work(), None))
        except BaseException as error:
            ends.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(120)
        found, error = ends[0]
        if error is not None:
            raise error
        return found

    return result


def laid_out(layout: str, seed: int) -> Any:
    return plait.parallelize(built(seed), {"train_micro_batch_size_per_gpu": 2, **(LAYOUTS[layout] or {})})


def trains(rank: int, world: int, layout: str, address: str, receivers: int) -> list[tuple[int, str]]:
    """Sends three versions, and is refused others. Runs in a worker."""
    source = laid_out(layout, 7)
    with plait.WeightSender(source, address, receivers=receivers, timeout=60) as sender:
        made = [sender.send(verify="content"), sender.send(version=4, verify="content")]
        with pytest.raises(InputError, match="version = 4 is stale"):
            sender.send(version=4)
        with pytest.raises(InputError, match="rank 1 sends version 9"):
            sender.send(version=8 + rank)
        sender._timeout = 0.5
        with pytest.raises(CommunicationError, match="generator rank 0 .* did not call receive"):
            sender.send()
        sender._timeout = 60
        sender._meeting.tell("go on", True) if rank == 0 else None
        with torch.no_grad():
            for parameter in source.model.parameters():
                local_tensor(parameter).mul_(2)
        made.append(sender.send(verify="content"))
    source.close()
    return [(one.version, one.content) for one in made]


def receives(target: Any, address: str) -> list[tuple[int, str]]:
    """Takes three versions and looks at every value."""
    made = []
    model = target if isinstance(target, torch.nn.Module) else target.model
    with plait.WeightReceiver(target, address, timeout=60) as receiver:
        for factor in (1, 1, 2):
            if factor == 2:
                receiver._meeting.ask({"go on": "the test"}, 60, "is slow")
            made.append(receiver.receive(wait=60))
            wanted = built(7).state_dict()
            for name, tensor in tensors_of(model, "target").items():
                expected = wanted[name] * factor if "norm" in name or name.endswith("weight") else wanted[name]
                window = window_of(tensor)
                everything = tuple((0, size) for size in expected.shape)
                assert torch.equal(local_tensor(tensor).detach(), expected[inside(window, everything)]), name
    return [(one.version, one.content) for one in made]


def generates(rank: int, world: int, layout: str, address: str) -> list[tuple[int, str]]:
    """Runs in a worker."""
    target = laid_out(layout, 8)
    made = receives(target, address)
    target.close()
    return made


def check(made: list[tuple[int, str]], sent: list[list[tuple[int, str]]]) -> None:
    assert [version for version, _ in made] == [0, 4, 5] and all(made == one for one in sent)
    assert made[0][1] == made[1][1] != made[2][1]


def test_to_a_process_apart(pool: Pool) -> None:
    address = free_address()
    sent = beside(lambda: pool.run(2, trains, "ZeRO 3", address, 1))
    check(receives(built(8), address), sent())


@pytest.mark.proof
@pytest.mark.parametrize(("one", "other"), [("ZeRO 3", "tp"), ("pp", "tp"), ("tp", "pp"), ("ZeRO 1", "ZeRO 3")])
def test_to_other_layouts(pool: Pool, one: str, other: str) -> None:
    address, apart = free_address(), Pool()
    sent = beside(lambda: pool.run(2, trains, one, address, 2))
    try:
        for made in apart.run(2, generates, other, address):
            check(made, sent())
    finally:
        apart.close()


def large(value: float) -> torch.nn.Module:
    """More bytes than sockets hold."""
    model = torch.nn.Linear(4096, 4096, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def ends_in_the_middle(address: str, how: int, directly: bool) -> None:
    """A receiver that a signal meets after its first piece."""
    if not directly:
        direct.can_read = lambda other: False
    took = direct.Direct.receive
    taken = []

    def take(self: Any, tensor: torch.Tensor, source: int) -> Any:
        taken.append(source)
        if len(taken) == 2:
            os.kill(os.getpid(), how)
        return took(self, tensor, source)

    direct.Direct.receive = take  # type: ignore[method-assign]
    link.WeightReceiver(large(0.0), address).receive()


@pytest.mark.parametrize(("how", "directly"), [(signal.SIGKILL, True), (signal.SIGSTOP, True), (signal.SIGKILL, False)])
def test_a_receiver_that_ends_or_stops_is_named(how: int, directly: bool) -> None:
    address = free_address()
    process = quick_starts().Process(target=ends_in_the_middle, args=(address, how, directly), daemon=True)
    process.start()
    try:
        with link.WeightSender(large(1.0), address, receivers=1) as sender:
            began = time.monotonic()
            with pytest.raises(CommunicationError, match=rf"generator rank 0 \(.*, process {process.pid}") as found:
                sender.send()
            assert time.monotonic() - began < 5.5
            assert ("has ended" in str(found.value)) == (how == signal.SIGKILL)
            with pytest.raises(CommunicationError, match="this connection ended"):
                sender.send()
    finally:
        process.kill()
        process.join()


def one_of_two(rank: int, address: str, others: str, heard: Any) -> None:
    """Of a generator of two, whose rank 1 is killed when its third piece comes; what rank 0 hears, and after how long."""
    dist.init_process_group("gloo", init_method=f"tcp://{others}", rank=rank, world_size=2)
    took, taken = direct.Direct.receive, []

    def take(self: Any, tensor: torch.Tensor, source: int) -> Any:
        wait = took(self, tensor, source)

        def end() -> None:
            taken.append(source)
            if rank and len(taken) == 3:
                heard.put(time.monotonic())
                os.kill(os.getpid(), signal.SIGKILL)
            wait()

        return end

    direct.Direct.receive = take  # type: ignore[method-assign]
    target = large(0.0)
    with link.WeightReceiver(target, address) as receiver:
        try:
            heard.put(f"version {receiver.receive().version}")
        except CommunicationError as error:
            with pytest.raises(InputError, match="mixes two versions"):
                status.refuse_incomplete(target)
            heard.put(str(error))


def test_one_receiver_of_two_that_ends() -> None:
    """The trainer names it, and the other one either has everything or knows that it has not."""
    address, others, start = free_address(), free_address(), quick_starts()
    heard = [start.SimpleQueue(), start.SimpleQueue()]
    processes = [start.Process(target=one_of_two, args=(rank, address, others, heard[rank]), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        with link.WeightSender(large(1.0), address, receivers=2) as sender:
            with pytest.raises(CommunicationError, match=rf"generator rank 1 \(.*, process {processes[1].pid}, which has ended\)"):
                sender.send()
            assert time.monotonic() - heard[1].get() < 5
        processes[0].join(10)
        assert processes[0].exitcode == 0
        assert re.match(r"version 0$|trainer rank 0 ", heard[0].get())
    finally:
        for process in processes:
            process.kill()
            process.join()


def ends_while_sending(address: str) -> None:
    """A trainer that is killed once 12 of 16 pieces have arrived."""
    gave, ended = direct.Direct.send, []

    def give(self: Any, tensor: torch.Tensor, target: int) -> Any:
        wait = gave(self, tensor, target)

        def end() -> None:
            wait()
            ended.append(tensor)
            if len(ended) == 12:
                os.kill(os.getpid(), signal.SIGKILL)

        return end

    direct.Direct.send = give  # type: ignore[method-assign]
    link.WeightSender(large(1.0), address, receivers=1).send()


def test_a_trainer_that_ends_leaves_no_mixed_weights() -> None:
    address = free_address()
    process = quick_starts().Process(target=ends_while_sending, args=(address,), daemon=True)
    process.start()
    target = large(0.0)
    try:
        with link.WeightReceiver(target, address) as receiver, pytest.raises(CommunicationError, match=r"trainer rank 0 .*has ended"):
            receiver.receive()
    finally:
        process.join()
    with pytest.raises(InputError, match="mixes two versions"):
        status.refuse_incomplete(target)


class Several(torch.nn.Module):
    """One tensor in two messages, one that does not lie in one stretch, one in another dtype, and small ones that go together."""

    def __init__(self, value: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.full((1500, 1024), value))
        self.turned = torch.nn.Parameter(torch.full((300, 500), value).t())
        self.small = torch.nn.ParameterList(torch.arange(1.0, size + 1) * value for size in (1, 3, 7))
        self.other = torch.nn.Parameter(torch.full((5, 5), value, dtype=dtype))
        self.register_buffer("count", torch.tensor(int(value)))


@pytest.mark.parametrize("directly", [True, False])
def test_tensors_of_any_form_arrive(monkeypatch: pytest.MonkeyPatch, directly: bool) -> None:
    address, target = free_address(), Several(0.0, torch.bfloat16)
    if not directly:
        monkeypatch.setattr(direct, "can_read", lambda _: False)

    def send() -> str:
        with link.WeightSender(Several(3.0, torch.float64), address, receivers=1, timeout=60) as sender:
            return sender.send(verify="content").content

    sent = beside(send)
    with link.WeightReceiver(target, address, timeout=60) as receiver:
        made = receiver.receive(wait=60)
    wanted = Several(3.0, torch.bfloat16).state_dict()
    assert made.content == sent() and made.bytes == sum(tensor.nbytes for tensor in wanted.values())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in target.state_dict().items())
    assert not target.turned.is_contiguous()


@pytest.mark.parametrize("which", [1, 2, 3])
@pytest.mark.parametrize("where", ["network", "source"])
@pytest.mark.parametrize("directly", [True, False])
def test_a_value_that_changes_on_the_way_is_noticed(monkeypatch: pytest.MonkeyPatch, directly: bool, where: str, which: int) -> None:
    """As of a network that spoils them, or of an optimizer that steps while weights are sent: in one message of the three kinds."""
    address, target, gave, sizes = free_address(), Several(0.0, torch.float32), direct.Direct.send, list[int]()

    def give(self: Any, tensor: torch.Tensor, to: int) -> Any:
        assert bool(self.ranks) is directly
        sizes.append(tensor.numel())
        if len(sizes) != which:
            return gave(self, tensor, to)
        other = tensor if where == "source" else tensor.clone()
        other[-1] ^= 1
        return gave(self, other, to)

    monkeypatch.setattr(direct.Direct, "send", give)
    if not directly:
        monkeypatch.setattr(direct, "can_read", lambda _: False)

    def send() -> None:
        with link.WeightSender(Several(3.0, torch.float32), address, receivers=1, timeout=60) as sender:
            with pytest.raises(CommunicationError, match="generator rank 0: what arrived from rank 0 of the source has the hash"):
                sender.send()
            with pytest.raises(CommunicationError, match="this connection ended"):
                sender.send()

    sent = beside(send)
    with link.WeightReceiver(target, address, timeout=60) as receiver:
        with pytest.raises(CommunicationError, match="what arrived from rank 0 of the source has the hash"):
            receiver.receive(wait=60)
        sent()
    assert len(sizes) == 5, "two of the large tensor, one of the turned one, the small ones together, and the hash"
    with pytest.raises(InputError, match="mixes two versions"):
        status.refuse_incomplete(target)


def test_memory_that_can_no_longer_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's kernel refuses; the sender need not wait for its time."""
    address, target, reads = free_address(), Several(0.0, torch.float32), direct.read

    def refuse(process: int, start: int, into: torch.Tensor) -> None:
        if into.nbytes > 1000:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        reads(process, start, into)

    monkeypatch.setattr(direct, "read", refuse)

    def send() -> None:
        sender = link.WeightSender(Several(3.0, torch.float32), address, receivers=1, timeout=60)
        began = time.monotonic()
        with pytest.raises(CommunicationError, match=r"generator rank 0 \(.*\) takes no weights: it failed"):
            sender.send()
        assert time.monotonic() - began < 30
        sender.close()

    sent = beside(send)
    said = rf"trainer rank 0 \(.*, process {os.getpid()}\) sends no weights: Operation not permitted"
    with link.WeightReceiver(target, address, timeout=60) as receiver, pytest.raises(CommunicationError, match=said):
        receiver.receive(wait=60)
    sent()
    with pytest.raises(InputError, match="mixes two versions"):
        status.refuse_incomplete(target)


def test_another_layout_than_at_the_start_is_refused() -> None:
    address, target = free_address(), Several(0.0, torch.float32)

    def send() -> None:
        with link.WeightSender(Several(3.0, torch.float32), address, receivers=1, timeout=60) as sender:
            sender.send()

    sent = beside(send)
    with link.WeightReceiver(target, address, timeout=60) as receiver:
        target.other.data = target.other.data.half()
        with pytest.raises(InputError, match="laid out otherwise"):
            receiver.receive()
        target.other.data = target.other.data.float()
        with pytest.raises(CommunicationError, match="sent no weights within 0.01 s"):
            receiver._meeting.ask({"nothing": f"{meeting.TRAINER} 0"}, 0.01, "sent no weights")
        assert receiver.receive(wait=60).version == 0 and bool((target.other == 3).all())
    sent()


def test_what_is_no_connection() -> None:
    for address in ("nowhere", "127.0.0.1:99999", ":5"):
        with pytest.raises(InputError, match="must be HOST:PORT"):
            link.WeightReceiver(built(8), address)
    address = free_address()
    with pytest.raises(CommunicationError, match="generator rank 0 has not connected within 0.1 s"):
        link.WeightSender(built(7), address, receivers=1, connect_timeout=0.1)
    with pytest.raises(CommunicationError, match="no trainer answered"):
        link.WeightReceiver(built(8), address, connect_timeout=0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot listen"):
            link.WeightSender(built(7), f"127.0.0.1:{taken.getsockname()[1]}", receivers=1)
    with pytest.raises(InputError, match="receivers = 0"):
        link.WeightSender(built(7), address, receivers=0)


def test_a_version_of_an_earlier_connection_is_stale() -> None:
    address, target = free_address(), torch.nn.Linear(4, 4)
    status.note(target, status.ReceivedWeights(6, "", 0, 0.0))

    def send() -> None:
        with link.WeightSender(torch.nn.Linear(4, 4), address, receivers=1, timeout=60) as sender:
            with pytest.raises(InputError, match="generator rank 0 has version 6 already"):
                sender.send(version=6)
            sender.send(version=7)

    sent = beside(send)
    with link.WeightReceiver(target, address, timeout=60) as receiver:
        assert receiver.receive(wait=60).version == 7
    sent()
