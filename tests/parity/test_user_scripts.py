"""Scripts as people have them, each with one import, argument or call changed, beside themselves: two processes, the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.user_scripts import ALL, DEEPSPEED_PYTHON, Script, on_peer, on_plait

QUICK = frozenset({"fsdp2_gpt"})
"""Run in every `make test`."""


def agree(found: Any, wanted: Any, rtol: float, where: str) -> None:
    """Nested lists and mappings of numbers and texts."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            agree(found[key], value, rtol, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for index, value in enumerate(wanted):
            agree(found[index], value, rtol, f"{where}[{index}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=rtol, abs=rtol / 10), where
    else:
        assert found == wanted, where


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            script, id=script.name, marks=() if script.name in QUICK else pytest.mark.proof
        )
        for script in ALL
    ],
)
def test_a_script(tmp_path: Path, script: Script) -> None:
    if script.peer == "deepspeed" and not DEEPSPEED_PYTHON:
        pytest.skip("PLAIT_DEEPSPEED_PYTHON is not set")
    found, wanted = on_plait(script, tmp_path), on_peer(script, tmp_path)
    for rank, numbers in wanted.items():
        agree(found[rank], numbers, script.rtol, f"rank {rank}")
        losses = numbers[0]
        assert len(losses) >= 4 and len(set(losses)) > 2
