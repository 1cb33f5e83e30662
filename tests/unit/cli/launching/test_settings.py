"""Settings of the launcher that contradict each other are refused."""

from functools import partial

import pytest

from plait.cli.launching.launch_settings import LaunchSettings, check, parse_nodes
from plait.errors import ConfigError
from tests.table import check_rows


def test_numbers_of_machines():
    for text, expected in {"1": (1, 1), "4": (4, 4), "2:8": (2, 8)}.items():
        assert parse_nodes(text) == expected
    for text in ("", "a", "2:", ":2", "1:2:3", "-1", "1.5"):
        with pytest.raises(ConfigError, match="--nnodes"):
            parse_nodes(text)


ONE = partial(LaunchSettings, 2)
TWO = partial(LaunchSettings, 2, 2, 2)
STATIC = partial(TWO, master_addr="a")
RENDEZVOUS = partial(TWO, rdzv_endpoint="a:1")


def test_consistent_settings_are_accepted():
    for settings in (
        ONE(),
        ONE(node_rank=0),
        ONE(max_restarts=3),
        ONE(standby=True, max_restarts=1),
        STATIC(node_rank=1),
        STATIC(node_rank=0, master_port=1234),
        RENDEZVOUS(max_restarts=3),
        LaunchSettings(2, 1, 4, rdzv_endpoint="a:1"),
    ):
        assert check(settings) is settings


WRONG = {
    "--nproc-per-node = 0": LaunchSettings(0),
    "--nnodes = '0:0'": LaunchSettings(2, 0, 0),
    "--nnodes = '3:2'": LaunchSettings(2, 3, 2, rdzv_endpoint="a:1"),
    "--max-restarts = -1": ONE(max_restarts=-1),
    "--grace = -1": ONE(grace_seconds=-1),
    "--timeout = 0": ONE(timeout_seconds=0),
    "--master-port = 70000": STATIC(node_rank=0, master_port=70000),
    "--rdzv-endpoint = 'a': not HOST:PORT": TWO(rdzv_endpoint="a"),
    "--node-rank = 1: there is one machine": ONE(node_rank=1),
    "the rendezvous address is not set": TWO(),
    "--node-rank: not set": STATIC(),
    "--node-rank = 2: not one of the 2": STATIC(node_rank=2),
    "--max-restarts = 1: with --master-addr": STATIC(node_rank=0, max_restarts=1),
    "--nnodes = '2:4': an elastic number": LaunchSettings(2, 2, 4, master_addr="a", node_rank=0),
    "--node-rank = 0: given together with --rdzv-endpoint": RENDEZVOUS(node_rank=0),
    "--master-addr = 'a': given together": RENDEZVOUS(master_addr="a"),
    "there is none; add --max-restarts N": ONE(standby=True),
}


def check_refused(row):
    message, settings = row
    with pytest.raises(ConfigError) as caught:
        check(settings)
    assert message in str(caught.value)


def test_contradictions_are_refused():
    check_rows({row[0]: row for row in WRONG.items()}, check_refused)


def test_all_problems_are_reported():
    with pytest.raises(ConfigError) as caught:
        check(LaunchSettings(0, 2, 2, max_restarts=-1, grace_seconds=-1))
    assert len(caught.value.problems) >= 4
