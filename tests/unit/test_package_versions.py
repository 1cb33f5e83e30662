"""Runs with other versions of packages are recorded, and shown on a page."""

import json

from tools.package_versions import PAGE, RESULTS, counts, sections, with_sections

JUNIT = """<testsuites><testsuite>
<testcase file="a.py" classname="a" name="passes"/>
<testcase file="a.py" classname="a" name="fails"><failure/></testcase>
<testcase file="a.py" classname="a" name="breaks"><error/></testcase>
<testcase file="a.py" classname="a" name="skips"><skipped/></testcase>
</testsuite></testsuites>"""


def test_the_page_is_that_of_the_results():
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = with_sections(PAGE, sections(rows))
    assert PAGE.read_text(encoding="utf-8") == page, "run python -m tools.package_versions"


def test_outcomes_are_counted(tmp_path):
    for name in ("one.xml", "two.xml"):
        (tmp_path / name).write_text(JUNIT)
    total = counts(sorted(tmp_path.iterdir()))
    assert (total["passed"], total["failed"], total["skipped"]) == (2, 4, 2)
    assert total["failures"] == ["a.py::fails", "a.py::breaks"] * 2


def test_failures_are_on_the_page():
    packages = {"torch": "2.13.0", "transformers": "5.24.0"}
    outcomes = {"passed": 7, "failed": 1, "skipped": 0, "failures": ["a::b"]}
    row = {
        "date": "2026-11-27",
        "python": "3.11.7",
        "packages": packages,
        "tests": "the set",
        **outcomes,
    }
    written = sections({"newest": row})["runs"]
    assert "| newest | 2026-11-27 | 3.11.7 | 2.13.0 | 5.24.0 | the set | 7 | 1 | 0 |" in written
    assert "Failed with newest:\n\n- `a::b`" in written
