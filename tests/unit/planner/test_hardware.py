"""Devices by the names of published tables, and clusters of them."""

import math

import pytest

from plait.cluster.machines import Node, Topology
from plait.errors import InputError
from plait.planner import hardware
from plait.planner.hardware import cluster, cluster_of, device, device_names
from plait.sizes import GIB


@pytest.mark.parametrize("name", device_names())
def test_every_entry_is_plausible(name):
    entry = device(name)
    assert entry.name == name and entry.source
    assert 1 * GIB < entry.memory_bytes < 400 * GIB
    if name != "cpu":
        assert entry.link_bandwidth > entry.nic_bandwidth or entry.link_bandwidth < 100e9
        assert entry.flops["fp16"] > entry.flops["fp32"]
    assert entry.domain >= entry.devices_per_node


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("H100-80GB-SXM", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100-96GB-HBM2e-500W", "h100-hbm2e"),
        ("H100-95GB-HBM2e (lower TDP)", "h100-hbm2e"),
        ("GH200 (H100-96GB)", "gh200"),
        ("A100-40GB-SXM", "a100-40gb"),
        ("A100-80GB (DGX)", "a100"),
        ("A800-80GB", "a800"),
        ("V100-32GB-SXM2", "v100-32gb"),
        ("V100-16GB-SXM2", "v100-16gb"),
        ("GB200 (inferred)", "gb200"),
        ("B200 (power limited)", "b200"),
        ("B200-SXM", "b200"),
        ("GB300", "gb300"),
        ("MI300X-192GB", "mi300x"),
        ("MI355X", "mi355x"),
        ("H200-141GB", "h200"),
        ("H800", "h800"),
        ("B200 (printed H200)", "b200"),
        ("A100-PCIe 80GB", "a100-pcie"),
        ("A10G", "a10g"),
        ("NVIDIA_H100_80GB_HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40", "l40s"),
        ("Tesla V100S-PCIE-32GB", "v100-32gb"),
        ("cpu", "cpu"),
    ],
)
def test_names_of_published_tables(spelling, name):
    assert device(spelling).name == name


def test_an_unknown_device_gets_a_similar_name():
    for name in ("h10", "h1000", "h100x", "xh100", "h100💥", "h100!"):
        with pytest.raises(InputError, match="did you mean h100"):
            device(name)


def test_a_cluster_has_whole_nodes():
    assert str(cluster("h100", 64)) == "64 x NVIDIA H100 SXM 80 GB, 8 per node"
    assert cluster("h100", 64).nodes == 8
    with pytest.raises(InputError, match=r"12 % 8 = 4; use 8 or 16"):
        cluster("h100", 12)
    with pytest.raises(InputError, match="at least one device"):
        cluster("h100", 0)


def test_the_domain_of_a_rack_is_wider_than_a_node():
    assert cluster("gb200", 64).device.domain == 72
    assert cluster("h100", 16, devices_per_node=4).device.domain == 4


def test_a_cluster_from_a_cluster_file():
    machines = Topology((Node("a", 4), Node("b", 4)), "cuda", 40 * GIB)
    both = cluster_of(machines, "a100")
    assert (both.devices, both.device.devices_per_node) == (8, 4)
    assert both.device.memory_bytes == 40 * GIB
    with pytest.raises(InputError, match=r"different numbers of devices \(2 and 4\)"):
        cluster_of(Topology((Node("a", 4), Node("b", 2)), "cuda"), "a100")


def test_stacked_devices_keep_their_own_figures():
    devices = [device("v100-32gb"), device("h100")]
    stacked = hardware.stack(devices)
    assert list(stacked.memory_bytes) == [entry.memory_bytes for entry in devices]
    # A V100 has no fp8.
    assert math.isnan(stacked.flops["fp8"][0])
    assert stacked.flops["fp8"][1] == 1979e12
