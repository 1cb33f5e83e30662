"""The remedies in messages of the commands work when they are followed."""

from __future__ import annotations

import errno
import json
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from plait.cli import generate, launch, verify
from plait.cli.launching import launch_settings, remote
from plait.cli.options import write_text
from plait.cli.validating import command as validating
from plait.cluster import topology
from plait.config.convert.conversion import convert
from plait.config.convert.translated import set_path
from plait.config.dialects.examine import examine
from plait.config.resolving.resolve import load
from plait.config.source import parse_override, read
from plait.errors import InputError, raise_problems
from plait.planner.configuration import complete, read_file
from plait.planner.hardware import cluster
from tests.advice import Case, check, command, read_table
from tests.unit.planner.jobs import llama

FILE = Path(__file__).with_name("advice.yaml")
HOSTFILES = {
    "two": "a slots=2\nb slots=2",
    "here": f"{socket.gethostname()} slots=2",
    "empty": "# none",
    "bad": "node1",
    "node1": "node1 slots=8",
    "twice": "a slots=2\na slots=1",
    "loopback": "localhost slots=2\nb slots=2",
    "users": "root@a slots=2\nroot@b slots=2",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_json(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_launch(folder, monkeypatch, capsys):
    for name, text in HOSTFILES.items():
        (folder / name).write_text(text)
    (folder / "a.py").write_text("")
    # tests/integration/test_launch.py starts processes.
    monkeypatch.setattr(
        launch,
        "_start",
        lambda command, settings, **_: launch_settings.check(settings) and 0,
    )
    monkeypatch.setattr(remote, "run", lambda hosts: 0)

    def run(line):
        """Run a line of variables and arguments. `nothing` stands for none of them."""
        with monkeypatch.context() as patch:
            arguments = line.replace("nothing", "").split()
            while arguments and "=" in arguments[0] and not arguments[0].startswith("-"):
                patch.setenv(*arguments.pop(0).split("="))
            # A new `command` per line, because it runs a line only once, and variables differ.
            command(capsys)(" ".join(["launch", *arguments]))

    check(read_table(FILE, "launches", run))


def test_launchers_variables(monkeypatch):
    def discover(line):
        """Read variables. GPUS and GROUP stand for devices and a process group that exist."""
        variables = {}
        for setting in line.replace("nothing", "").split():
            name, _, value = setting.partition("=")
            variables[name] = value
        gpus = int(variables.pop("GPUS", 0))
        group = variables.pop("GROUP", "")
        start = topology.init_method if "meets" in variables else topology.discover
        # Devices and process groups that this machine does not have.
        with monkeypatch.context() as patch:
            patch.setattr(topology, "device_count", lambda: gpus)
            patch.setattr(topology.accelerator, "capacity_bytes", lambda index: 1)
            if group:
                rank, _, size = group.partition("/")
                patch.setattr(topology, "_existing_group", lambda: (int(rank), int(size), "gloo"))
            for name, value in variables.items():
                patch.setenv(name, value)
            start()

    check(read_table(FILE, "variables", discover))


def convert_and_load(line):
    """Convert keys of Accelerate or the Trainer, or flags of Megatron-LM, and load the result.

    `+` adds a setting to the converted file.
    """
    added, source = [], []
    for argument in line.split():
        if argument.startswith("+"):
            added.append(argument[1:])
        else:
            source.append(argument)
    if not source[0].startswith("--"):
        tree: dict[str, Any] = {}
        for path, value in map(parse_override, source):
            assert set_path(tree, ".".join(path), value) is None
        source = tree
    conversion = convert(source)
    raise_problems(conversion.problems)
    load(conversion.tree, added)


def test_conversions(folder):
    stage = {"zero_optimization": {"stage": 2}}
    bf16 = {"bf16": {"enabled": True}}
    write_json(folder, two=stage, bf16=bf16, both=stage | bf16)
    check(read_table(FILE, "conversions", convert_and_load))


LLAMA = llama(num_hidden_layers=4, num_key_value_heads=4)


def complete_plan(text):
    """Plan the layout of a file with another value of a key. No value removes the key."""
    path, value = parse_override(text)
    parallel = {"tp": "auto", "pp": 1}
    tree = {"train_batch_size": 8, "model": {"config": LLAMA}, "parallel": parallel}
    overrides = [(path, value)]
    if value == "":
        del tree[path[0]]
        overrides = []
    complete(read_file(examine(read(tree), overrides)), cluster=cluster("h100", 2))


def test_plans():
    check(read_table(FILE, "plans", complete_plan))


MODELS = """
import torch, plait
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))

def linear():
    return nn.Linear(8, 16)

def number():
    return 1

def with_batches():
    def batch(samples, generator):
        return torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    return linear(), plait.per_sample(lambda output, batch: output.square().mean()), batch
"""
SHORT = {
    "PLAN": "plan --model gpt2 GPUS BATCH",
    "GPUS": "--gpu h100 --world-size 2",
    "BATCH": "--batch 8 --seq 512 --fix pp=1,stage=3",
}


def test_commands(folder, monkeypatch, capsys):
    run = {"train_batch_size": 8, "data": {"source": "python-stdlib", "sequence_length": 16}}
    write_json(
        folder,
        config=LLAMA,
        bare=run,
        run={**run, "model": {"config": LLAMA}},
        accelerate={"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"},
    )
    (folder / "small_models.py").write_text(MODELS)
    # The commands end where they would start processes.
    monkeypatch.setattr(launch, "run", lambda module, settings: 0)
    monkeypatch.setattr(validating, "validate", lambda **settings: 0)
    monkeypatch.setattr(verify, "_start", lambda plan, seconds: sys.exit(0))
    plait = command(capsys)

    def run_line(line):
        for name, text in SHORT.items():
            line = line.replace(name, text)
        plait(line)

    check(read_table(FILE, "commands", run_line))


ARGUMENTS = generate.GenerateArguments("m", None, "stored", 2, 1, "a", None, None, 1, None)


def test_full_disks(folder, monkeypatch):
    """A file on a full disk is /dev/full. A folder on one would need a mount, and is imitated."""
    full = folder / "full"
    other = folder / "other"
    full.mkdir()
    other.mkdir()
    original = Path.write_text

    def write(path, *arguments, **options):
        if full in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, *arguments, **options)

    def write_arguments(temporary):
        monkeypatch.setenv("TMPDIR", str(temporary))
        # Python chooses the folder once per process.
        monkeypatch.setattr(tempfile, "tempdir", None)
        # The private function, because the command starts processes after it.
        with generate._argument_file(ARGUMENTS, []) as file:
            assert file.is_relative_to(temporary)

    def write_output(path):
        write_text("--out", path, "text")

    # What was written before a disk was full is deleted, or the same command would refuse it.
    rest = folder / "rest.json"

    def write_a_part(path, *_, **__):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_a_part)
        with pytest.raises(InputError, match="free some space there"):
            write_output(rest)
    assert not rest.exists()

    monkeypatch.setattr(Path, "write_text", write)
    cases = [
        Case(
            ("free some space, or name another folder with TMPDIR",),
            partial(write_arguments, full),
            partial(write_arguments, other),
        ),
        Case(
            (
                "--out /dev/full: cannot be written (No space left on device)",
                "free some space there, or pass another path",
            ),
            partial(write_output, Path("/dev/full")),
            partial(write_output, other / "out.json"),
        ),
    ]
    check(cases)
