"""docs/devices.md is made from what machines sent in, and says plainly where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.validation.document import document
from plait.validation.rows import Result
from tests.unit.validation.launches import FACTS
from tools import devices

RESULTS = [
    Result("parity/zero3-bf16", "ZeRO 3, 2 ranks", "passed", "", 4.2,
           {"computes_in": "bfloat16 with float32 parameters", "float64": {"largest_error": 3e-15}, "configured": {}}),
    Result("memory/one-rank", "peak memory", "passed", "", 20.0,
           {"model": {}, "samples": 2, "length": 64, "allowed": 0.02, "float32": [{"predicted": 101, "measured": 100}]}),
    Result("step/ddp", "a step beside DDP", "failed", "a step takes 1.30 times that of DDP, allowed 1.2", 30.0, {"ratio": 1.3}),
    Result("links/gpus", "collectives", "not run", "there is one GPU"),
]  # fmt: skip


def sent_in(**changed: Any) -> dict[str, Any]:
    found = document({**FACTS, "gpus_used": 2}, RESULTS, at="2026-12-01T10:00:00+00:00", seconds=840, only=())
    return {**found, **changed}


def test_the_page() -> None:
    text = devices.page({"2xh100.json": sent_in()})
    assert "| 2 x NVIDIA H100 80GB HBM3, 80.0 GiB | 2026-12-01 | 0.1.0 | 2.13.0+cu130 | 2 | 1 | 1 |" in text
    assert "float64: 3e-15; bfloat16" in text and "largest difference 1.0%" in text
    assert "**failed** | 30 | a step takes 1.30 times" in text and "not run | 0 | there is one GPU" in text
    assert devices.NONE not in text


def test_without_a_file() -> None:
    assert "**No result of a real device is here yet.**" in devices.page({})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "not JSON"),
        (json.dumps({"rows": []}), "not a document of format 1"),
        (json.dumps(sent_in(simulated=True)), "of a simulated device"),
    ],
)
def test_wrong_files(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(devices.WrongFile, match=told):
        devices.read(tmp_path)


def test_the_page_in_the_repository_is_what_the_files_make() -> None:
    assert devices.main(["--check"]) == 0
