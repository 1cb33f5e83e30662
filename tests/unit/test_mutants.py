"""The list of planted defects stays a list of defects: each still applies to the sources, and a probe finds its place."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from tools.mutants import page, results
from tools.mutants.__main__ import check
from tools.mutants.catalogue import ROOT, Mutant, load
from tools.mutants.probes import probed


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    """All planted defects. Reading the lists takes a second."""
    return load()


def test_every_mutant_applies(mutants: list[Mutant]) -> None:
    assert len(mutants) >= 60
    check(mutants)


def test_probes_stand_before_what_mutants_change(mutants: list[Mutant]) -> None:
    by_file = defaultdict(list)
    for mutant in mutants:
        by_file[mutant.file].append(mutant)
    for name, members in by_file.items():
        text = probed((ROOT / name).read_text(encoding="utf-8"), members)
        ast.parse(text)
        assert [text.count(f"_probe({mutant.id!r})") for mutant in members] == [1] * len(members)


def test_a_list_that_has_rotted_is_refused() -> None:
    mutant = Mutant("x", "nothing", "src/plait/sizes.py", "no such text", "other", "known")
    with pytest.raises(ValueError, match="occurs 0 times"):
        check([mutant])


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "mutants.json"
    assert results.load(file) == ({}, "")
    test = "tests/unit/test_a.py::test_one[case]"
    outcomes = {
        "first": {"caught_by": test, "seconds": 4},
        "second": {"caught_by": "(hangs)", "seconds": 600},
        "third": {"caught_by": "", "seconds": 9, "ran": "everything", "verify": True},
    }
    results.store(outcomes, file, "2026-11-27")
    assert results.load(file) == (outcomes, "2026-11-27")


def test_page_has_the_last_results(
    mutants: list[Mutant], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The page of the project follows its results only until the list of defects changes, so another file is written.
    monkeypatch.setattr(page, "PAGE", tmp_path / "mutants.md")
    page.write(mutants, *results.load())
    written = page.PAGE.read_text(encoding="utf-8")
    assert f"Last run: {results.load()[1]}." in written
    assert all(f"| {mutant.id} |" in written for mutant in mutants)
