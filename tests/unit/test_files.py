"""Anonymous files exist also with the Pythons of uv and conda, which lack the call."""

import fcntl
import os
import platform
import sys

import pytest

from plait.files import anonymous_file

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="a system call of Linux on x86-64",
)


@pytest.mark.parametrize("python", ["with memfd_create", "without"])
def test_an_anonymous_file(python, monkeypatch):
    if python == "without":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    descriptor = anonymous_file("plait")
    try:
        os.ftruncate(descriptor, 100)
        os.pwrite(descriptor, b"abc", 50)
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:plait")
        with open(f"/proc/{os.getpid()}/fd/{descriptor}", "rb") as other:
            assert other.read()[50:53] == b"abc"
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        os.close(descriptor)


def test_a_refusal_of_the_kernel_is_an_os_error(monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with pytest.raises(OSError, match="Invalid argument"):
        anonymous_file("a" * 300)
