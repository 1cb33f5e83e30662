"""The place of a process in the world, for every launcher, and the devices of the machines."""

import os
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from plait.cluster import mesh, process_groups, topology
from plait.cluster.launchers import first_host, tasks_per_node
from plait.cluster.machines import Node, Topology
from plait.cluster.topology import (
    RankInfo,
    default_processes,
    discover,
    init_method,
    place,
    thread_count,
)
from plait.errors import ConfigError


def variables_of(text, prefix=""):
    """Return the variables of a text like "RANK=5 SIZE=8"."""
    variables = {}
    for assignment in text.split():
        name, value = assignment.split("=")
        variables[prefix + name] = value
    return variables


TORCHRUN = variables_of("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1")
DEEPSPEED = variables_of("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4 CROSS_RANK=1 CROSS_SIZE=2")
OPENMPI = variables_of("RANK=5 SIZE=8 LOCAL_RANK=1 LOCAL_SIZE=4 NODE_RANK=1", "OMPI_COMM_WORLD_")
MPICH = variables_of("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4")
SRUN = variables_of(
    "JOB_ID=4242 STEP_ID=0 PROCID=5 NTASKS=8 STEP_NUM_TASKS=8 LOCALID=1 NODEID=1 "
    "STEP_NODELIST=gpu[007-008] STEP_TASKS_PER_NODE=4(x2)",
    "SLURM_",
)
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "deepspeed": DEEPSPEED,
    "openmpi": OPENMPI,
    "mpich": MPICH,
    "srun": SRUN,
}
NAMES = {"MASTER_ADDR", "MASTER_PORT"}.union(*LAUNCHERS.values())


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def _set(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def _gpus(monkeypatch, count):
    """Let this machine have a number of GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


class TestPlace:
    def test_without_a_launcher_there_is_one_process(self):
        assert place() == RankInfo(0, 1, 0, 1, 0)

    @pytest.mark.parametrize("launcher", LAUNCHERS)
    def test_every_launcher_gives_the_same_place(self, monkeypatch, launcher):
        _set(monkeypatch, LAUNCHERS[launcher])
        assert place() == RankInfo(5, 8, 1, 4, 1)

    @pytest.mark.parametrize(
        "outer",
        [SRUN, {**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}],
        ids=["srun", "mpirun"],
    )
    def test_torchrun_inside_another_launcher_has_precedence(self, monkeypatch, outer):
        step = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
        _set(monkeypatch, {**outer, **step, **TORCHRUN})
        assert place() == RankInfo(5, 8, 1, 4, 1)

    def test_mpirun_inside_srun_has_precedence(self, monkeypatch):
        _set(monkeypatch, {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", **MPICH})
        assert place().rank == 5

    def test_a_slurm_batch_script_is_one_process(self, monkeypatch):
        _set(monkeypatch, {**SRUN, "SLURM_PROCID": "0"})
        for name in SRUN:
            if "STEP" in name:
                monkeypatch.delenv(name)
        assert place() == RankInfo()

    def test_uneven_srun(self, monkeypatch):
        uneven = variables_of(
            "PROCID=4 STEP_NUM_TASKS=6 LOCALID=0 STEP_TASKS_PER_NODE=4,2", "SLURM_"
        )
        _set(monkeypatch, SRUN | uneven)
        assert place() == RankInfo(4, 6, 0, 2, 1)

    @pytest.mark.parametrize(
        ("variables", "start", "message"),
        [
            ({"RANK": "0"}, "WORLD_SIZE", "although RANK is"),
            ({"WORLD_SIZE": "2"}, "RANK", "although WORLD_SIZE is"),
            ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2", "WORLD_SIZE = 2"),
            ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK = 'one'", "whole number"),
            ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK = '-1'", "whole number"),
            ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK = 4", "LOCAL_WORLD_SIZE = 4"),
            ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE = 16", "WORLD_SIZE = 8"),
            ({**TORCHRUN, "RANK": "0"}, "LOCAL_RANK = 1", "RANK = 0"),
            (
                {**OPENMPI, "OMPI_COMM_WORLD_RANK": "9"},
                "OMPI_COMM_WORLD_RANK = 9",
                "OMPI_COMM_WORLD_SIZE = 8",
            ),
        ],
    )
    def test_contradictions_are_refused(self, monkeypatch, variables, start, message):
        _set(monkeypatch, variables)
        with pytest.raises(ConfigError) as error:
            place()
        assert str(error.value).startswith(start)
        assert message in str(error.value)

    @pytest.mark.parametrize(
        ("gpus", "rank", "world", "expected"),
        [
            # Without GPUs all processes are on one machine.
            (0, 3, 4, RankInfo(3, 4, 3, 4, 0)),
            # They fit on the GPUs of this machine.
            (8, 3, 4, RankInfo(3, 4, 3, 4, 0)),
            # A machine with one GPU has one process.
            (1, 3, 4, RankInfo(3, 4, 0, 1, 3)),
        ],
    )
    def test_rank_and_size_alone(self, monkeypatch, gpus, rank, world, expected):
        _gpus(monkeypatch, gpus)
        _set(monkeypatch, {"RANK": str(rank), "WORLD_SIZE": str(world)})
        assert place() == expected

    def test_rank_and_size_alone_are_refused_if_ambiguous(self, monkeypatch):
        _gpus(monkeypatch, 8)
        _set(monkeypatch, {"RANK": "3", "WORLD_SIZE": "16"})
        message = "LOCAL_RANK: not set, and 16 processes cannot all be on this machine .* 8 GPUs"
        with pytest.raises(ConfigError, match=message):
            place()

    @given(nodes=st.integers(1, 64), per_node=st.integers(1, 16), data=st.data())
    def test_any_torchrun_world(self, nodes, per_node, data):
        node = data.draw(st.integers(0, nodes - 1))
        local = data.draw(st.integers(0, per_node - 1))
        rank = node * per_node + local
        world = nodes * per_node
        # Without GROUP_RANK (DeepSpeed's older versions) the node follows from the ranks.
        values = f"RANK={rank} WORLD_SIZE={world} LOCAL_RANK={local} LOCAL_WORLD_SIZE={per_node}"
        expected = RankInfo(rank, world, local, per_node, node)
        with pytest.MonkeyPatch.context() as patch:
            _set(patch, variables_of(values))
            assert place() == expected


class TestExistingGroup:
    @pytest.fixture
    def group(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    @pytest.mark.usefixtures("group")
    def test_the_group_decides(self):
        assert place() == RankInfo(0, 1, 0, 1, 0)

    @pytest.mark.usefixtures("group")
    def test_variables_that_contradict_it_are_refused(self, monkeypatch):
        _set(monkeypatch, TORCHRUN)
        message = "the launcher says rank 5 of 8, but the existing gloo .* says rank 0 of 1"
        with pytest.raises(ConfigError, match=message):
            place()

    def test_a_fake_group_of_any_size_has_one_device(self, monkeypatch):
        _gpus(monkeypatch, 8)
        dist.init_process_group("fake", store=FakeStore(), rank=700, world_size=1024)
        try:
            assert place() == RankInfo(700, 1024, 0, 1, 0)
        finally:
            dist.destroy_process_group()


class TestInitMethod:
    def test_from_the_launcher(self, monkeypatch):
        _set(monkeypatch, {"MASTER_ADDR": "a", "MASTER_PORT": "1"})
        assert init_method() == "env://"

    def test_all_tasks_of_srun_agree_without_variables(self, monkeypatch):
        for rank in range(8):
            task = variables_of(f"PROCID={rank} LOCALID={rank % 4} NODEID={rank // 4}", "SLURM_")
            _set(monkeypatch, SRUN | task)
            assert init_method() == "tcp://gpu007:19694"

    def test_an_address_without_a_port_is_refused(self, monkeypatch):
        _set(monkeypatch, {**SRUN, "MASTER_ADDR": "a"})
        with pytest.raises(ConfigError, match="MASTER_PORT: not set"):
            init_method()

    def test_a_missing_address_is_refused(self, monkeypatch):
        _set(monkeypatch, OPENMPI)
        with pytest.raises(ConfigError, match="MASTER_ADDR: not set"):
            init_method()


def test_first_host_of_a_slurm_list():
    hosts = variables_of(
        "gpu[007-012,020],cpu1=gpu007 one=one a,b=a r1n[3,5]-ib=r1n3-ib n[1-2],m[1-2]=n1 "
        "rack[1-2]node[1-4],x=rack1node1"
    )
    for text, host in hosts.items():
        assert first_host(text) == host


@given(st.lists(st.tuples(st.integers(1, 32), st.integers(1, 5)), min_size=1, max_size=6))
def test_slurm_task_counts(runs):
    parts = []
    expected = []
    for count, times in runs:
        parts.append(f"{count}(x{times})" if times > 1 else str(count))
        expected += [count] * times
    assert tasks_per_node(",".join(parts)) == expected


def test_unknown_slurm_task_counts_are_refused():
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
        tasks_per_node("4(2)")


class TestDiscover:
    def test_a_machine_without_gpus(self, monkeypatch):
        _gpus(monkeypatch, 0)
        machine = discover()
        assert machine.nodes == (Node(socket.gethostname(), 1),)
        assert machine.device_type == "cpu"
        physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert 0 < machine.memory_bytes <= physical_bytes

    def test_processes_share_the_memory_of_a_machine(self, monkeypatch):
        _gpus(monkeypatch, 0)
        total_bytes = discover().memory_bytes
        _set(monkeypatch, {**TORCHRUN, "WORLD_SIZE": "8"})
        machines = discover()
        assert machines.memory_bytes == total_bytes // 4
        assert machines.nodes == (Node("node0", 4), Node(socket.gethostname(), 4))
        assert machines.world_size == 8

    def test_gpus(self, monkeypatch):
        _gpus(monkeypatch, 3)
        sizes = [SimpleNamespace(total_memory=size) for size in (80, 40, 80)]
        monkeypatch.setattr(torch.cuda, "get_device_properties", sizes.__getitem__)
        assert discover() == Topology((Node(socket.gethostname(), 3),), "cuda", 40)

    def test_uneven_machines_are_refused(self, monkeypatch):
        _set(monkeypatch, {**TORCHRUN, "WORLD_SIZE": "7"})
        with pytest.raises(ConfigError, match="WORLD_SIZE = 7: not a multiple of the 4"):
            discover()


class TestThreads:
    @given(cores=st.integers(1, 256), processes=st.integers(1, 300))
    def test_processes_share_the_cores(self, cores, processes):
        # This machine has another number of cores.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(topology, "cpu_count", lambda: cores)
            threads = thread_count(processes)
        assert threads >= 1
        assert threads * processes <= max(cores, processes)
        assert (threads + 1) * processes > cores

    def test_affinity_counts(self):
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            assert topology.cpu_count() == 1
        finally:
            os.sched_setaffinity(0, before)

    def test_default_processes(self, monkeypatch):
        for gpus, cores, expected in ((8, 1, 8), (0, 64, 2), (0, 1, 1)):
            _gpus(monkeypatch, gpus)
            monkeypatch.setattr(topology, "cpu_count", lambda cores=cores: cores)
            assert default_processes() == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SRUN, "tcp://gpu007:"),
        ({**TORCHRUN, "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "env://"),
        (OPENMPI, "MASTER_ADDR: not set"),
    ],
)
def test_the_default_group_uses_the_launchers_address(monkeypatch, variables, expected):
    """The default group is created at the address of the launcher, and refused without one."""
    _set(monkeypatch, variables)
    _gpus(monkeypatch, 0)
    results = []

    def rendezvous(method, *_, **__):
        results.append(method)
        return iter([(dist.HashStore(), 0, 2)])

    # There is no other process, so neither the rendezvous nor the group can be real.
    monkeypatch.setattr(process_groups, "rendezvous", rendezvous)
    monkeypatch.setattr(process_groups, "_stores", {})
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    # The other ranks, for which the check would wait, do not exist.
    monkeypatch.setattr(mesh, "check_open_files", lambda *_: None)
    try:
        mesh._make_default_group(
            place(), torch.device("cpu"), mesh.DEFAULT_TIMEOUT, host_tensors=False
        )
    except ConfigError as error:
        results.append(str(error))
    (result,) = results
    assert result.startswith(expected)
