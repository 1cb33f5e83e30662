import pytest

from plait.cluster.machines import Node, Topology
from plait.errors import InputError
from plait.planner import hardware
from plait.planner.hardware import cluster, cluster_of, device, device_names
from plait.sizes import GIB


@pytest.mark.parametrize("name", device_names())
def test_every_entry_is_plausible(name):
    found = device(name)
    assert found.name == name and found.source
    assert 1 * GIB < found.memory_bytes < 400 * GIB
    if name != "cpu":
        assert found.link_bandwidth > found.nic_bandwidth or found.link_bandwidth < 100e9
        assert found.flops["fp16"] > found.flops["fp32"]
    assert found.domain >= found.devices_per_node


@pytest.mark.parametrize(
    ("written", "name"),
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
def test_names_of_published_tables(written, name):
    assert device(written).name == name


@pytest.mark.parametrize("written", ["h10", "h1000", "h100x", "xh100", "h100💥", "h100!"])
def test_an_unknown_device_names_the_nearest(written):
    with pytest.raises(InputError, match="did you mean h100"):
        device(written)


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


def test_from_a_cluster_file():
    machines = Topology((Node("a", 4), Node("b", 4)), "cuda", 40 * GIB)
    found = cluster_of(machines, "a100")
    assert (found.devices, found.device.devices_per_node, found.device.memory_bytes) == (
        8,
        4,
        40 * GIB,
    )
    with pytest.raises(InputError, match=r"different numbers of devices \(2 and 4\)"):
        cluster_of(Topology((Node("a", 4), Node("b", 2)), "cuda"), "a100")


def test_stacked_devices_keep_their_own_figures():
    both = hardware.stack([device("v100-32gb"), device("h100")])
    assert list(both.memory_bytes) == [
        device("v100-32gb").memory_bytes,
        device("h100").memory_bytes,
    ]
    assert (
        both.flops["fp8"][1] == 1979e12 and both.flops["fp8"][0] != both.flops["fp8"][0]
    )  # a V100 has none
