"""Which rows a machine has, in which order, and how long they are planned for."""

from importlib import import_module

import pytest

from plait.cli.validating.command import DEFAULT_MINUTES
from plait.errors import InputError
from plait.parallel.schedules.schedule import SCHEDULES as ALL_SCHEDULES
from plait.sizes import GIB
from plait.validation.catalogue import MOST_GPUS, SCHEDULES, Machine, planned_seconds, rows_of
from plait.validation.rows import exit_code, not_run

H100 = Machine(gpus=1, memory_bytes=80 * GIB)


def all_rows(gpus):
    checks = "ceilings waits parity throughput nccl profile memory offload streaming kernels"
    more = "compression checkpoint largest planned"
    rows = rows_of(Machine(gpus, 80 * GIB), f"{checks} {more}".split())
    return [row.name for row in rows]


def test_the_default_rows_fit_into_the_default_budget():
    """What runs on one H100 without peers is planned for at most eight minutes."""
    assert planned_seconds(rows_of(H100)) <= 60 * DEFAULT_MINUTES


def test_the_order_of_value():
    checks = list(dict.fromkeys(row.name.split("/")[0] for row in rows_of(H100)))
    assert checks == [
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


@pytest.mark.parametrize("gpus", range(1, 9))
def test_rows_of_a_machine(gpus):
    """Names are unique, functions exist, and each schedule of a pipeline has a row of parity."""
    names = all_rows(gpus)
    assert len(set(names)) == len(names)
    assert tuple(ALL_SCHEDULES) == SCHEDULES
    assert {f"parity/layout-pp-{schedule}" for schedule in SCHEDULES} <= set(names)
    rows = rows_of(Machine(gpus, 80 * GIB), ["*"])
    for row in rows:
        module, function = row.check.split(":")
        assert callable(getattr(import_module(f"plait.validation.{module}"), function)), row.name
        assert row.ranks <= MOST_GPUS
    nccl = {row.name: row.unavailable for row in rows if row.name.startswith("nccl/")}
    assert all("do not test NCCL" in reason for reason in nccl.values()) == (gpus == 1)
    assert bool(nccl["nccl/step-tp"]) == (gpus == 1 or gpus % 2 == 1)


def test_rows_that_a_machine_cannot_run():
    """Each has a reason, and a validation of which nothing ran does not end well."""
    small = {row.name: row.unavailable for row in rows_of(Machine(1, 4 * GIB), ["parity"])}
    assert small["parity/layout-3d"] == "8 ranks on a GPU need 8 GiB, and it has 4.0 GiB"
    assert not small["parity/layout-pp-4"]
    bare = rows_of(Machine(2, 80 * GIB, transformers=False))
    assert {row.name for row in bare if not row.unavailable} == {
        "ceilings/device",
        "ceilings/host-link",
        "nccl/collectives",
    }
    assert exit_code([not_run(row, row.unavailable) for row in bare if row.unavailable]) == 1
    peers = {row.name: row.unavailable for row in rows_of(H100, ["throughput"])}
    assert peers["throughput/liger"] == "Liger is not installed"
    assert peers["throughput/deepspeed"] == "DeepSpeed is not installed"
    installed = Machine(1, 80 * GIB, installed_peers=("deepspeed", "liger_kernel"))
    assert not any(row.unavailable for row in rows_of(installed, ["throughput"]))


def test_rows_of_a_pattern():
    names = [row.name for row in rows_of(H100, ["parity"])]
    assert "parity/bf16" in names and "parity/layout-3d" in names
    assert [row.name for row in rows_of(H100, ["waits/stage-*"])] == [
        "waits/stage-0",
        "waits/stage-1",
        "waits/stage-3",
    ]
    with pytest.raises(InputError, match="use one of ceilings, waits, parity"):
        rows_of(H100, ["parity/zero9"])
