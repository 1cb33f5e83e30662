"""The end of a worker process.

A thread of gloo may still let go of a finished collective's tensors while the interpreter shuts down; where it then needs the interpreter's
lock, the process aborts (SIGABRT) after all its work was done. A worker that has closed its files leaves without that shutdown.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End this process with `code`, once its output is written. Nothing registered with `atexit` runs."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
