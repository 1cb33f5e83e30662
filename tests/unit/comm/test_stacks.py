"""Stacks of processes that cannot run Python: stopped, or in a call that holds the GIL."""

import os
import signal
import subprocess
import sys

import pytest

from plait.comm import stacks

SCRIPT = """
import ctypes, faulthandler, os, signal, sys, threading, time
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
faulthandler.register(int(sys.argv[2]), file=file, all_threads=True)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def hold():
    print("ready", flush=True)
    if sys.argv[3] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    ctypes.PyDLL(None).sleep(60)
hold()
"""


@pytest.mark.parametrize("state", ["stops", "holds"])
def test_a_process_that_cannot_run_python_writes_its_stacks(tmp_path, state):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    log = tmp_path / "log"
    copy = tmp_path / "new" / "copy"
    arguments = [str(script), str(log), str(int(stacks.SIGNAL)), state]
    command = [sys.executable, "-S", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            if state == "stops":
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                assert stacks.state(process.pid) == "T"
            assert stacks.collect(process.pid, log, copy, 5) == copy
            line = stacks.users_line(copy)
            assert line.startswith(f"{script}:")
            assert line.endswith(" in hold")
            # The signal continued the stopped process. A second copy has only its new stacks.
            if state == "stops":
                second = tmp_path / "second"
                assert stacks.collect(process.pid, log, second, 5) == second
                assert second.read_text().count("in hold") == 1
        finally:
            process.send_signal(signal.SIGKILL)
    assert stacks.state(process.pid) == ""
    assert stacks.collect(process.pid, log, copy, 0.1) is None


def test_files_of_the_user():
    assert stacks.is_users("/home/me/train.py")
    for module in (os, stacks, pytest):
        assert not stacks.is_users(module.__file__)
