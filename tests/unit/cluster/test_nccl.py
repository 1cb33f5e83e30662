"""What NCCL is told is refused where it would not be read."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.cluster.nccl import Library, report
from plait.errors import ConfigError
from tests.unit.config.cases import resolved


def test_variables_are_set_before_the_group() -> None:
    environment = {"HOME": "x"}
    Library(algorithm="Ring").export(environment, device_type="cuda", group_exists=False)
    assert environment == {"HOME": "x", "NCCL_ALGO": "Ring"}
    Library(algorithm="ring", protocol="^LL").export(
        environment, device_type="cuda", group_exists=False
    )
    assert environment["NCCL_PROTO"] == "^LL"
    Library().export(environment, device_type="cpu", group_exists=True)


@pytest.mark.parametrize(
    ("device_type", "group_exists", "environment", "why"),
    [
        ("cpu", False, {}, "communicate through gloo, which does not read NCCL_ALGO; leave it out"),
        (
            "cuda",
            True,
            {},
            "the process group exists, and NCCL reads NCCL_ALGO when it is made; set NCCL_ALGO before that",
        ),
        (
            "cuda",
            False,
            {"NCCL_ALGO": "Tree"},
            "the environment sets NCCL_ALGO=Tree; set it in one place",
        ),
    ],
)
def test_what_would_not_be_read_is_refused(
    device_type: str, group_exists: bool, environment: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        Library(algorithm="Ring").export(
            environment, device_type=device_type, group_exists=group_exists
        )


def test_a_run_on_the_cpu_refuses_before_it_makes_a_group() -> None:
    with pytest.raises(
        ConfigError, match="parallel.nccl_protocol = 'LL': the processes run on the cpu"
    ):
        build_mesh(Layout(), device_type="cpu", library=Library(protocol="LL"))
    assert not dist.is_initialized()


def test_names_are_nccls_own() -> None:
    assert resolved(
        {"parallel": {"nccl_algorithm": "nvls,tree", "nccl_protocol": "^ll"}}
    ).library == Library(algorithm="NVLS,Tree", protocol="^LL")
    with pytest.raises(ConfigError, match="'butterfly' is none of NCCL's Ring, Tree"):
        resolved({"parallel": {"nccl_algorithm": "butterfly"}})


def test_the_report() -> None:
    lines = report({"NCCL_ALGO": "Ring"}, version=(2, 27, 5))
    assert lines[0] == "NCCL 2.27.5"
    assert any(line.split()[:2] == ["NCCL_ALGO", "Ring"] for line in lines)
    assert any(line.split()[:3] == ["NCCL_PROTO", "not", "set"] for line in lines)
    assert "no NCCL" in report({}, version=None)[0]
