"""Rows that a machine has, their order, and their planned times."""

from importlib import import_module
from operator import attrgetter

import pytest

from plait.cli.validating.command import DEFAULT_MINUTES
from plait.errors import InputError
from plait.parallel.schedules.schedule import SCHEDULES as ALL_SCHEDULES
from plait.sizes import GIB
from plait.validation.catalogue import MOST_GPUS, SCHEDULES, Machine, planned_seconds, rows_of
from plait.validation.rows import exit_code, not_run

H100 = Machine(gpus=1, memory_bytes=80 * GIB)
BY_VALUE = [
    "ceilings",
    "waits",
    "parity",
    "throughput",
    "nccl",
    "profile",
    "memory",
    "offload",
    "streaming",
    "kernels",
]


def reasons_of(machine, patterns=None):
    """Return why each row of a machine cannot run, by name."""
    return {row.name: row.unavailable for row in rows_of(machine, patterns or ())}


def test_the_default_rows_fit_into_the_default_budget():
    assert planned_seconds(rows_of(H100)) <= 60 * DEFAULT_MINUTES


def test_rows_are_in_the_order_of_their_value():
    assert list(dict.fromkeys(row.name.split("/")[0] for row in rows_of(H100))) == BY_VALUE


@pytest.mark.parametrize("gpus", range(1, 9))
def test_rows_of_a_machine(gpus):
    machine = Machine(gpus, 80 * GIB)
    rows = rows_of(machine, ["*"])
    for row in rows:
        module, function = row.check.split(":")
        assert callable(getattr(import_module(f"plait.validation.{module}"), function)), row.name
        assert row.ranks <= MOST_GPUS

    checks = [*BY_VALUE, "compression", "checkpoint", "largest", "planned"]
    names = [row.name for row in rows_of(machine, checks)]
    assert len(set(names)) == len(names)
    assert tuple(ALL_SCHEDULES) == SCHEDULES
    for schedule in SCHEDULES:
        assert f"parity/layout-pp-{schedule}" in names

    nccl = reasons_of(machine, ["nccl"])
    for reason in nccl.values():
        assert ("do not test NCCL" in reason) == (gpus == 1)
    assert bool(nccl["nccl/step-tp"]) == (gpus == 1 or gpus % 2 == 1)


def test_rows_that_a_machine_cannot_run_have_a_reason():
    small = reasons_of(Machine(1, 4 * GIB), ["parity"])
    assert small["parity/layout-3d"] == "8 ranks on a GPU need 8 GiB, and it has 4.0 GiB"
    assert not small["parity/layout-pp-4"]

    rows = rows_of(Machine(2, 80 * GIB, transformers=False))
    unavailable = list(filter(attrgetter("unavailable"), rows))
    available = set(map(attrgetter("name"), rows)) - set(map(attrgetter("name"), unavailable))
    assert available == {"ceilings/device", "ceilings/host-link", "nccl/collectives"}
    # A validation in which no row ran fails.
    assert exit_code([not_run(row, row.unavailable) for row in unavailable]) == 1

    peers = reasons_of(H100, ["throughput"])
    assert peers["throughput/liger"] == "Liger is not installed"
    assert peers["throughput/deepspeed"] == "DeepSpeed is not installed"
    installed = Machine(1, 80 * GIB, installed_peers=("deepspeed", "liger_kernel"))
    assert not any(reasons_of(installed, ["throughput"]).values())


def test_rows_of_a_pattern():
    names = reasons_of(H100, ["parity"])
    assert "parity/bf16" in names and "parity/layout-3d" in names
    stages = ["waits/stage-0", "waits/stage-1", "waits/stage-3"]
    assert list(reasons_of(H100, ["waits/stage-*"])) == stages
    with pytest.raises(InputError, match="use one of ceilings, waits, parity"):
        rows_of(H100, ["parity/zero9"])
