"""The faults that are planted, and what must come of each: how soon it is told, in which words, with which exit code."""

from __future__ import annotations

from dataclasses import dataclass

TIMEOUT_SECONDS = 5.0
ALLOWED_SECONDS = 3.0
"""From the fault, or from the end of the timeout, to its first line."""
EXIT_SECONDS = 10.0
"""From that line to the end of the last process."""


@dataclass(frozen=True)
class Kind:
    """A fault of one rank."""

    name: str
    first_line: str
    """A pattern for the first line about it; {rank}, {step} and {others} are filled in."""
    exit_code: int
    hangs: bool = False
    """Whether it can only be noticed by its absence, when the timeout is over."""
    condition: str = ""
    """A pattern that some later line has."""


_RAISED = r"plait: rank {rank} \(node .*, process \d+\) failed with exit code 1. Its traceback:"
_STUCK = (
    r"plait: rank {rank} is stuck in step {step}, (forward|backward|between steps): {others} (has|have) waited [5-8]\.\d s in [a-z-]+ over "
    r"[a-z_ ]+( \(dp_shard\))? \(number \d+, \[.*\] \w+\) at .*worker\.py:\d+; the timeout is 5 s"
)
_KILLED = r"plait: rank {rank} \(node .*\) was killed by signal {number}"

KINDS = (
    Kind("exception", _RAISED, 1, condition="ValueError: a planted exception"),
    Kind("out of memory", _RAISED, 1, condition="MemoryError: a planted lack"),
    Kind("disk full", _RAISED, 1, condition="No space left on device"),
    Kind("bad batch", _RAISED, 1, condition="RuntimeError: mat1 and mat2"),
    Kind("exit 0", r"plait: rank {rank} .*ended with exit code 0 before the others", 5),
    Kind("exit 7", r"plait: rank {rank} \(node .*\) ended with exit code 7", 7),
    Kind("segmentation fault", _KILLED.replace("{number}", "11 SIGSEGV"), 139),
    Kind("abort", _KILLED.replace("{number}", "6 SIGABRT"), 134),
    Kind("SIGKILL", _KILLED.replace("{number}", "9 SIGKILL"), 137),
    Kind(
        "SIGSTOP",
        _STUCK,
        5,
        hangs=True,
        condition=r"rank {rank} .*its process is stopped.*stacks of its threads are in",
    ),
    Kind(
        "sleep",
        _STUCK,
        5,
        hangs=True,
        condition=r"rank {rank} .*at .*worker\.py:\d+ in happen; the stacks",
    ),
    Kind(
        "interpreter's lock",
        _STUCK,
        5,
        hangs=True,
        condition=r"rank {rank} .*holds the interpreter's lock; the stacks",
    ),
    Kind(
        "blocked read",
        _STUCK,
        5,
        hangs=True,
        condition=r"rank {rank} .*at .*worker\.py:\d+ in happen; the stacks",
    ),
    Kind("failed and does not end", _RAISED, 1, condition="ValueError: a planted exception"),
)
