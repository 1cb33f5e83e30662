from __future__ import annotations

import pytest

from plait.cli.launching.launch_settings import LaunchSettings, check, parse_nodes
from plait.errors import ConfigError


@pytest.mark.parametrize(("text", "expected"), [("1", (1, 1)), ("4", (4, 4)), ("2:8", (2, 8))])
def test_numbers_of_machines(text: str, expected: tuple[int, int]) -> None:
    assert parse_nodes(text) == expected


@pytest.mark.parametrize("text", ["", "a", "2:", ":2", "1:2:3", "-1", "1.5"])
def test_no_numbers_of_machines(text: str) -> None:
    with pytest.raises(ConfigError, match="--nnodes"):
        parse_nodes(text)


@pytest.mark.parametrize(
    "settings",
    [
        LaunchSettings(2),
        LaunchSettings(2, node_rank=0),
        LaunchSettings(2, max_restarts=3),
        LaunchSettings(2, 2, 2, node_rank=1, master_addr="a"),
        LaunchSettings(2, 2, 2, node_rank=0, master_addr="a", master_port=1234),
        LaunchSettings(2, 2, 2, rdzv_endpoint="a:1", max_restarts=3),
        LaunchSettings(2, 1, 4, rdzv_endpoint="a:1"),
    ],
)
def test_what_can_work(settings: LaunchSettings) -> None:
    assert check(settings) is settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (LaunchSettings(0), "--nproc-per-node = 0"),
        (LaunchSettings(2, 0, 0), "--nnodes = '0:0'"),
        (LaunchSettings(2, 3, 2, rdzv_endpoint="a:1"), "--nnodes = '3:2'"),
        (LaunchSettings(2, max_restarts=-1), "--max-restarts = -1"),
        (LaunchSettings(2, grace_seconds=-1), "--grace = -1"),
        (LaunchSettings(2, timeout_seconds=0), "--timeout = 0"),
        (
            LaunchSettings(2, 2, 2, node_rank=0, master_addr="a", master_port=70000),
            "--master-port = 70000",
        ),
        (LaunchSettings(2, 2, 2, rdzv_endpoint="a"), "--rdzv-endpoint = 'a': not HOST:PORT"),
        (LaunchSettings(2, node_rank=1), "--node-rank = 1: there is one machine"),
        (LaunchSettings(2, 2, 2), "do not know where to meet"),
        (LaunchSettings(2, 2, 2, master_addr="a"), "--node-rank: not set"),
        (
            LaunchSettings(2, 2, 2, master_addr="a", node_rank=2),
            "--node-rank = 2: not one of the 2",
        ),
        (
            LaunchSettings(2, 2, 2, master_addr="a", node_rank=0, max_restarts=1),
            "--max-restarts = 1: with --master-addr",
        ),
        (
            LaunchSettings(2, 2, 4, master_addr="a", node_rank=0),
            "--nnodes = '2:4': an elastic number",
        ),
        (
            LaunchSettings(2, 2, 2, rdzv_endpoint="a:1", node_rank=0),
            "--node-rank = 0: given together with --rdzv-endpoint",
        ),
        (
            LaunchSettings(2, 2, 2, rdzv_endpoint="a:1", master_addr="a"),
            "--master-addr = 'a': given together",
        ),
    ],
)
def test_what_cannot(settings: LaunchSettings, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(settings)
    assert words in str(caught.value)


def test_everything_wrong_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        check(LaunchSettings(0, 2, 2, max_restarts=-1, grace_seconds=-1))
    assert len(caught.value.problems) >= 4
