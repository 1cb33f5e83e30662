"""The record of runs with other versions of packages, and its page."""

import json

from tools.package_versions import PAGE, RESULTS, counts, sections, with_sections

JUNIT = """<testsuites><testsuite>
<testcase file="a.py" classname="a" name="passes"/><testcase file="a.py" classname="a" name="fails"><failure/></testcase>
<testcase file="a.py" classname="a" name="breaks"><error/></testcase><testcase file="a.py" classname="a" name="skips"><skipped/></testcase>
</testsuite></testsuites>"""


def test_page():
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = with_sections(PAGE, sections(rows))
    assert PAGE.read_text(encoding="utf-8") == page, "run python -m tools.package_versions"


def test_counts(tmp_path):
    for name in ("one.xml", "two.xml"):
        (tmp_path / name).write_text(JUNIT)
    found = counts(sorted(tmp_path.iterdir()))
    assert (found["passed"], found["failed"], found["skipped"]) == (2, 4, 2)
    assert found["failures"] == ["a.py::fails", "a.py::breaks"] * 2


def test_what_failed_is_on_the_page():
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
