"""What is said where machines do not meet."""

from __future__ import annotations

import pytest

from plait.cli.launching.agent import LaunchError, launch
from plait.cli.launching.launch_settings import LaunchSettings


def test_a_name_without_an_address() -> None:
    settings = LaunchSettings(
        1, 2, 2, rdzv_endpoint="no-such-machine.invalid:29400", timeout_seconds=2.0
    )
    with pytest.raises(LaunchError) as raised:
        launch(["script.py"], settings)
    said = str(raised.value)
    assert (
        "finds no address for the name 'no-such-machine.invalid'" in said and "correct it" in said
    )
    assert len(said.splitlines()) == 1
