"""The stacks of a process that cannot run Python: one that is stopped, and one whose call holds the interpreter's lock."""

import os
import signal
import subprocess
import sys

import pytest

from plait.comm import stacks

VICTIM = """
import ctypes, faulthandler, os, signal, sys, threading, time
faulthandler.register(int(sys.argv[2]), file=os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND), all_threads=True)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def hold():
    print("ready", flush=True)
    if sys.argv[3] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    ctypes.PyDLL(None).sleep(60)
hold()
"""


@pytest.mark.parametrize("does", ["stops", "holds"])
def test_a_process_that_cannot_run_python_writes_its_stacks(tmp_path, does):
    (tmp_path / "victim.py").write_text(VICTIM)
    written, kept = tmp_path / "written", tmp_path / "new" / "kept"
    command = [
        sys.executable,
        "-S",
        str(tmp_path / "victim.py"),
        str(written),
        str(int(stacks.SIGNAL)),
        does,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            if does == "stops":
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                assert stacks.state(process.pid) == "T"
            assert stacks.collect(process.pid, written, kept, 5) == kept
            line = stacks.users_line(kept)
            assert line.startswith(f"{tmp_path / 'victim.py'}:") and line.endswith(" in hold")
            again = tmp_path / "again"
            if does == "stops":  # and goes on now, into the other
                assert stacks.collect(process.pid, written, again, 5) == again
                assert again.read_text().count("in hold") == 1, "of what is new alone"
        finally:
            process.send_signal(signal.SIGKILL)
    assert stacks.state(process.pid) == ""
    assert stacks.collect(process.pid, written, kept, 0.1) is None


def test_whose_source_a_file_is():
    assert stacks.is_users("/home/me/train.py")
    assert (
        not stacks.is_users(os.__file__)
        and not stacks.is_users(stacks.__file__)
        and not stacks.is_users(pytest.__file__)
    )
