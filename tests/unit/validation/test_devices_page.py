"""docs/reference/devices.md is generated from documents of real machines."""

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


def document_of(*more_results):
    facts = {**FACTS, "gpus_used": 2}
    results = [*RESULTS, *more_results]
    return document(facts, results, at="2026-12-01T10:00:00+00:00", seconds=840, only=())


def test_the_page_has_every_result():
    text = devices.page({"2xh100.json": document_of()})
    for line in (
        "| 2 x NVIDIA H100 80GB HBM3, 80.0 GiB | 2026-12-01 | 0.1.0 | 2.13.0+cu130 | 3 | 1 | 1 |",
        "float64: 3e-15, bfloat16 with float32 parameters: 70% of what is allowed",
        "measured 100.0 GiB, prediction +1.0%",
        "| 61 of 100 | plait 16,384 tokens/s, MFU 40.0%; fsdp2 20,480 tokens/s",
        "step of plait / fsdp2 1.250 (1.200 to 1.300)",
        f"**failed** | 70 of 80 | {REASON}",
        "not run | 0 of 12 | there is one GPU",
    ):
        assert line in text
    assert devices.NONE not in text


def test_a_page_without_documents_says_so():
    assert "**There is no result of a real device yet.**" in devices.page({})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        (json.dumps({"rows": []}), "not a document of format 2"),
        (json.dumps({**document_of(), "simulated": True}), "a simulated device"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(devices.WrongFile, match=message):
        devices.read(tmp_path)


def test_an_added_document_is_shorter_and_gives_the_same_page(monkeypatch, tmp_path):
    # The folder and the page of the repository stay as they are.
    monkeypatch.setattr(devices, "FOLDER", tmp_path / "devices")
    monkeypatch.setattr(devices, "PAGE", tmp_path / "devices.md")
    devices.FOLDER.mkdir()
    numbers = {
        "kernels_per_step": 2382.0,
        "idle_share": 0.25,
        "idle_seconds_between_steps": None,
        "median_gap_seconds": 2e-6,
        "longest_kernels": [
            {"name": f"kernel {number}", "per_step": 1.0, "seconds_per_step": 1 / 3}
            for number in range(10)
        ],
    }
    profile = Result("profile/plait", "kernels", "passed", "", 1.0, 2, numbers)
    sent = document_of(profile)
    (tmp_path / "validation.json").write_text(json.dumps(sent, indent=1))

    assert devices.main(["--add", str(tmp_path / "validation.json"), "2xh100"]) == 0

    added = json.loads((devices.FOLDER / "2xh100.json").read_text())
    kernels = added["rows"][-1]["numbers"]["longest_kernels"]
    assert [kernel["name"] for kernel in kernels] == [f"kernel {number}" for number in range(5)]
    assert devices.PAGE.read_text() == devices.page({"2xh100.json": sent})


def test_the_page_in_the_repository_is_current():
    assert devices.main(["--check"]) == 0
