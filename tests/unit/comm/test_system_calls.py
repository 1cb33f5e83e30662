"""B1: what uv's and conda's Pythons lack is asked of the kernel."""

from __future__ import annotations

import fcntl
import os
import platform
import select
import subprocess
import sys

import pytest

from plait.comm import system_calls

pytestmark = pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="system calls of Linux on x86-64")


@pytest.fixture(params=["as it is", "without"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        for name in ("memfd_create", "pidfd_open", "MFD_CLOEXEC"):
            monkeypatch.delattr(os, name, raising=False)


@pytest.mark.usefixtures("python")
def test_an_anonymous_file() -> None:
    descriptor = system_calls.memfd_create("plait")
    try:
        os.ftruncate(descriptor, 100)
        os.pwrite(descriptor, b"abc", 50)
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:plait")
        with open(f"/proc/{os.getpid()}/fd/{descriptor}", "rb") as other:
            assert other.read()[50:53] == b"abc"
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("python")
def test_the_end_of_a_process_is_seen() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = system_calls.pidfd_open(process.pid)
    try:
        assert not select.select([descriptor], [], [], 0)[0]
        process.communicate(b"\n")
        assert select.select([descriptor], [], [], 60)[0]
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("python")
def test_what_the_kernel_refuses_is_an_os_error() -> None:
    with pytest.raises(ProcessLookupError):
        system_calls.pidfd_open(2**22 + 1)
