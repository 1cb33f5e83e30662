"""The page of what users run into follows its results, and Plait's side of them holds."""

from __future__ import annotations

import json

import pytest

from tools.pains.__main__ import cell
from tools.pains.page import DOCUMENT, RESULT, table, written
from tools.pains.scenarios import LIBRARIES, PAINS


def test_the_page_has_the_results() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert written(text) == text
    known = json.loads(RESULT.read_text(encoding="utf-8"))
    assert all(set(known["cells"][str(number)]) == set(LIBRARIES) for number in PAINS)
    known["cells"]["7"]["plait"]["said"] = "something else"
    assert "something else" in table(known) and "something else" not in text


def test_plait_has_no_cell_that_is_wrong() -> None:
    outcomes = {
        number: cells["plait"]["outcome"]
        for number, cells in json.loads(RESULT.read_text(encoding="utf-8"))["cells"].items()
    }
    assert {number for number, outcome in outcomes.items() if outcome != "right"} == {
        "15"
    } and outcomes["15"] == "refused"


@pytest.mark.proof
@pytest.mark.parametrize("number", list(PAINS))
def test_a_scenario(number: int) -> None:
    found = cell("plait", number)
    assert found["outcome"] == ("refused" if number == 15 else "right"), found
