"""A standard output that takes no more."""

from __future__ import annotations

import errno
import os
import signal
import sys


def close_stdout(error: OSError) -> int:
    """The exit code where the reader of standard output is gone, as with `| head -1`, or there is
    no room for it, which is told. Python would tell it again at its end.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    print(f"plait: standard output cannot be written ({error.strerror})", file=sys.stderr)
    return 1
