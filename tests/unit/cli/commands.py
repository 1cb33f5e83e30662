"""Command lines that tests run in this process."""

import shlex

from plait.cli.main import main

# Without pipelines and other stages a search is shorter.
PLAN = "plan --model llama-3-8b --world-size 16 --gpu h100 --batch 64 --seq 2048 --fix pp=1,stage=3"
SMALL_PLAN = "plan --model gpt2 --world-size 2 --gpu h100 --batch 4 --seq 512"


def run(line, *arguments):
    """Run `plait` with a line and further arguments, and return its exit code."""
    try:
        return int(main([*shlex.split(line), *map(str, arguments)]) or 0)
    except SystemExit as end:
        return int(end.code or 0)
