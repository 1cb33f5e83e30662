"""Runs `plait` in this process."""

import shlex

import pytest

from plait.cli.main import main


def run_plait(line, *arguments, code=0):
    """Run `plait` with a line of arguments and further ones, and check its exit code."""
    with pytest.raises(SystemExit) as end:
        main([*shlex.split(line), *map(str, arguments)])
    assert (end.value.code or 0) == code
