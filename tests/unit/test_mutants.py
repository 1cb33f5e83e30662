"""The list of planted defects stays a list of defects: each still applies to the sources, and a probe finds its place."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest

from tools.mutants.__main__ import check
from tools.mutants.catalogue import ROOT, Mutant, load
from tools.mutants.probes import probed


def test_every_mutant_applies() -> None:
    mutants = load()
    assert len(mutants) >= 60
    check(mutants)


def test_probes_stand_before_what_mutants_change() -> None:
    by_file = defaultdict(list)
    for mutant in load():
        by_file[mutant.file].append(mutant)
    for name, members in by_file.items():
        text = probed((ROOT / name).read_text(encoding="utf-8"), members)
        ast.parse(text)
        assert [text.count(f"_probe({mutant.id!r})") for mutant in members] == [1] * len(members)


def test_a_list_that_has_rotted_is_refused() -> None:
    mutant = Mutant("x", "nothing", "src/plait/units.py", "no such text", "other", "known")
    with pytest.raises(ValueError, match="occurs 0 times"):
        check([mutant])
