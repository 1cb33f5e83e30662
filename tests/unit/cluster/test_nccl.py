"""What `plait doctor --nccl` prints."""

from __future__ import annotations

from plait.cluster.accelerator import library_report


def test_the_library_report() -> None:
    lines = library_report({"NCCL_ALGO": "Ring"}, version=(2, 27, 5))
    assert lines[0] == "NCCL 2.27.5"
    assert any(line.split()[:2] == ["NCCL_ALGO", "Ring"] for line in lines)
    assert any(line.split()[:3] == ["NCCL_PROTO", "not", "set"] for line in lines)
    assert "no NCCL" in library_report({}, version=None)[0]
