"""Settings of the launcher are checked. Contradictions between options are in ../advice.yaml."""

import pytest

from plait.cli.launching.launch_settings import LaunchSettings, check, parse_nodes
from plait.errors import ConfigError


def test_numbers_of_machines():
    for text, expected in {"1": (1, 1), "4": (4, 4), "2:8": (2, 8)}.items():
        assert parse_nodes(text) == expected
    for text in ("", "a", "2:", ":2", "1:2:3", "-1", "1.5"):
        with pytest.raises(ConfigError, match="--nnodes"):
            parse_nodes(text)


@pytest.mark.parametrize(
    "settings",
    [
        LaunchSettings(2, node_rank=0),
        LaunchSettings(2, max_restarts=3),
        LaunchSettings(2, 2, 2, rdzv_endpoint="a:1", max_restarts=3),
    ],
)
def test_consistent_settings_are_accepted(settings):
    assert check(settings) is settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LaunchSettings(2, 0, 0), "--nnodes = '0:0'"),
        (LaunchSettings(2, 2, 2, master_addr="a", node_rank=0, master_port=70000), "= 70000"),
        (
            LaunchSettings(2, 2, 2, rdzv_endpoint="a:1", master_addr="a"),
            "--master-addr = 'a': given together",
        ),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        check(settings)


def test_all_problems_are_reported():
    with pytest.raises(ConfigError) as error:
        check(LaunchSettings(0, 2, 2, max_restarts=-1, grace_seconds=-1))
    assert len(error.value.problems) >= 4
