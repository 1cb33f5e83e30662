"""docs/reference/devices.md is generated from documents of real machines, and says so if there are none."""

import json

import pytest

from plait.validation.rows import Result, document
from tests.unit.validation.launches import FACTS
from tools import devices

PARITY = {
    "computes_in": "bfloat16 with float32 parameters",
    "float64": {"largest_error": 3e-15},
    "configured": {"largest_share_of_allowed": 0.7},
}
MEMORY = {
    "workload": {},
    "allowed": 0.02,
    "stage-0": [{"predicted": 101 * 2**30, "measured": 100 * 2**30}],
}
THROUGHPUT = {
    "seconds": {"plait": 0.5, "fsdp2": 0.4},
    "tokens_per_second": {"plait": 16384.0, "fsdp2": 20480.0},
    "mfu": {"plait": 0.4, "fsdp2": 0.5},
    "ratio": {"fsdp2": {"median": 1.25, "least": 1.2, "most": 1.3}},
}
REASON = "a step takes 1.25 times that of fsdp2, 1.2 are allowed"
RESULTS = [
    Result("parity/bf16", "bfloat16, stage 0", "passed", "", 4.2, 8, PARITY),
    Result("memory/stage-0", "peak memory", "passed", "", 20.0, 7, MEMORY),
    Result("throughput/compiled", "a Llama", "passed", "", 61.0, 100, THROUGHPUT),
    Result("throughput/eager", "a Llama", "failed", REASON, 70.0, 80, THROUGHPUT),
    Result("nccl/collectives", "collectives", "not run", "there is one GPU", 0.0, 12),
]


def sent_in(**changed):
    found = document(
        {**FACTS, "gpus_used": 2}, RESULTS, at="2026-12-01T10:00:00+00:00", seconds=840, only=()
    )
    return {**found, **changed}


def test_the_page():
    text = devices.page({"2xh100.json": sent_in()})
    assert (
        "| 2 x NVIDIA H100 80GB HBM3, 80.0 GiB | 2026-12-01 | 0.1.0 | 2.13.0+cu130 | 3 | 1 | 1 |"
        in text
    )
    assert "float64: 3e-15, bfloat16 with float32 parameters: 70% of what is allowed" in text
    assert "measured 100.0 GiB, prediction +1.0%" in text
    assert "| 61 of 100 | plait 16,384 tokens/s, MFU 40.0%; fsdp2 20,480 tokens/s" in text
    assert "step of plait / fsdp2 1.250 (1.200 to 1.300)" in text
    assert f"**failed** | 70 of 80 | {REASON}" in text
    assert "not run | 0 of 12 | there is one GPU" in text
    assert devices.NONE not in text


def test_without_a_file():
    assert "**There is no result of a real device yet.**" in devices.page({})


@pytest.mark.parametrize(
    ("content", "told"),
    [("{", "not JSON"), (json.dumps({"rows": []}), "not a document of format 2"), (json.dumps(sent_in(simulated=True)), "a simulated device")],
)  # fmt: skip
def test_wrong_files(content, told, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(devices.WrongFile, match=told):
        devices.read(tmp_path)


def test_an_added_document_is_shorter_and_gives_the_same_page(monkeypatch, tmp_path):
    # The folder and the page of the repository stay as they are.
    monkeypatch.setattr(devices, "FOLDER", tmp_path / "devices")
    monkeypatch.setattr(devices, "PAGE", tmp_path / "devices.md")
    devices.FOLDER.mkdir()
    kernels = [
        {"name": f"kernel {number}", "per_step": 1.0, "seconds_per_step": 1 / 3}
        for number in range(10)
    ]
    profile = {
        "name": "profile/plait",
        "title": "kernels",
        "outcome": "passed",
        "reason": "",
        "seconds": 1.0,
        "planned_seconds": 2,
        "numbers": {
            "kernels_per_step": 2382.0,
            "idle_share": 0.25,
            "idle_seconds_between_steps": None,
            "median_gap_seconds": 2e-6,
            "longest_kernels": kernels,
        },
    }
    sent = sent_in()
    sent["rows"].append(profile)
    (tmp_path / "validation.json").write_text(json.dumps(sent, indent=1))

    assert devices.main(["--add", str(tmp_path / "validation.json"), "2xh100"]) == 0

    added = json.loads((devices.FOLDER / "2xh100.json").read_text())
    assert [kernel["name"] for kernel in added["rows"][-1]["numbers"]["longest_kernels"]] == [
        f"kernel {number}" for number in range(5)
    ]
    assert devices.PAGE.read_text() == devices.page({"2xh100.json": sent})


def test_the_page_in_the_repository():
    assert devices.main(["--check"]) == 0
