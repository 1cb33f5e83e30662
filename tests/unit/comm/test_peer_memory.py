"""Memory of another process: read where that is allowed, and refused with the kernel's reason where it is not."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.comm import peer_memory
from plait.comm.peer_memory import Proof, can_read, proof, read, readable
from tests.pool import quick_starts


def shows(out: Any, ends: Any) -> None:
    """Another process, with values in its memory."""
    values = torch.arange(3 << 20)
    with readable():
        out.put((proof().to_json(), values.data_ptr()))
        ends.get()


def test_of_another_process() -> None:
    start = quick_starts()
    out, ends = start.SimpleQueue(), start.SimpleQueue()
    process = start.Process(target=shows, args=(out, ends), daemon=True)
    process.start()
    told, address = out.get()
    theirs, found = Proof(**told), torch.zeros(3 << 20, dtype=torch.int64)
    assert theirs.process == process.pid and theirs != proof() and can_read(theirs)
    read(theirs.process, address + 80, found[10:])
    assert torch.equal(found[10:], torch.arange(10, 3 << 20)) and not found[:10].any()
    for other in (
        replace(theirs, value=proof().value),
        replace(theirs, boot="another"),
        replace(theirs, boot=""),
        replace(theirs, start=8),
    ):
        assert not can_read(other)
    with pytest.raises(OSError) as refused:
        read(theirs.process, 8, found)
    assert refused.value.errno == errno.EFAULT
    ends.put(None)
    process.join()
    assert not can_read(theirs)
    with pytest.raises(ProcessLookupError):
        read(theirs.process, address, found)


def test_a_forked_process_has_a_proof_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = proof()
    monkeypatch.setattr(os, "getpid", lambda: mine.process + 1)
    assert proof().process == mine.process + 1 and proof().value != mine.value


def test_who_may_read_is_set_for_as_long_as_somebody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[int]()

    class Library:
        @staticmethod
        def prctl(option: int, who: ctypes.c_ulong, *_: int) -> None:
            assert option == peer_memory._SET_PTRACER
            called.append(who.value)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library)
    with readable():
        pass
    monkeypatch.setattr(peer_memory, "_has_to_allow", lambda: True)
    with suppress(KeyError), readable():
        with readable():
            pass
        assert called == [ctypes.c_ulong(-1).value]
        raise KeyError
    assert called == [ctypes.c_ulong(-1).value, 0]
