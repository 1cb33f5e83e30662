"""Planted defects still apply to the sources, and probes stand where they change them."""

import ast
import subprocess
import sys
from collections import defaultdict

import pytest

from tools.mutants import report
from tools.mutants.catalogue import Mutant, check, load
from tools.mutants.project import ROOT
from tools.mutants.reach import probed


@pytest.fixture(scope="module")
def mutants():
    """Read all planted defects once, which takes a second."""
    return load()


def test_every_mutant_applies(mutants):
    assert len(mutants) >= 60
    check(mutants)


def test_planted_lines_use_names_that_exist(mutants, tmp_path):
    """A defect that ends in NameError is noticed by any test that reaches it."""
    for mutant in mutants:
        (tmp_path / f"{mutant.id}.py").write_text(mutant.applied())
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,E9"]
    checked = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_probes_stand_before_what_mutants_change(mutants):
    by_file = defaultdict(list)
    for mutant in mutants:
        by_file[mutant.file].append(mutant)
    for name, members in by_file.items():
        text = probed((ROOT / name).read_text(encoding="utf-8"), members)
        ast.parse(text)
        assert [text.count(f"_probe({mutant.id!r})") for mutant in members] == [1] * len(members)


def test_a_defect_that_does_not_apply_is_refused():
    mutant = Mutant("x", "nothing", "src/plait/sizes.py", "no such text", "other", "known")
    with pytest.raises(ValueError, match="occurs 0 times"):
        check([mutant])


def test_results_survive_their_file(tmp_path):
    file = tmp_path / "mutants.json"
    assert report.load(file) == ({}, "")
    test = "tests/unit/test_a.py::test_one[case]"
    outcomes = {
        "first": {"caught_by": test},
        "second": {"caught_by": "(hangs)"},
        "third": {"caught_by": "", "ran": "everything"},
        "fourth": {"caught_by": "tests/unit/test_b.py"},
    }
    report.store(outcomes, file, "2026-11-27")
    assert report.load(file) == (outcomes, "2026-11-27")


def test_page_has_the_last_results(mutants):
    # The page of the project follows its results only until the list of defects changes.
    results, date = report.load()
    written = report.page(mutants, results, date)
    assert f"Last run: {date}." in written
    assert all(f"| {mutant.id} |" in written for mutant in mutants)
