"""docs/development/coverage.md is generated from the recorded results."""

import importlib

import pytest

JUNIT = """<?xml version="1.0"?><testsuites><testsuite timestamp="2026-01-02T03:04:05">
<testcase classname="tests.a.test_x" name="test_one[1-a.b]" file="tests/a/test_x.py"/>
<testcase classname="tests.a.test_x" name="test_one[2]" file="tests/a/test_x.py">
<skipped/></testcase>
<testcase classname="tests.a.test_x" name="test_one_more" file="tests/a/test_x.py">
<failure/></testcase>
<testcase classname="tests.a.test_x.TestIt" name="test_two" file="tests/a/test_x.py">
<error/></testcase>
</testsuite></testsuites>"""
TESTS = """
def test_one(): ...
def test_one_more(): ...
class TestIt:
    def test_two(self): ...
"""
MISSION = """
- id: A1
  statement: first
  command: make x
  tests: {L0: ['tests/a/test_x.py::test_one'], L1: ['tests/a/test_x.py::TestIt']}
- {id: A2, statement: second}
"""


@pytest.fixture(scope="module")
def coverage():
    return importlib.import_module("tools.coverage")


@pytest.fixture
def project(tmp_path):
    (tmp_path / "docs" / "development").mkdir(parents=True)
    (tmp_path / "tests" / "a").mkdir(parents=True)
    (tmp_path / "tests" / "a" / "test_x.py").write_text(TESTS)
    (tmp_path / "docs" / "development" / "mission.yaml").write_text(MISSION)
    (tmp_path / "run.xml").write_text(JUNIT)
    return tmp_path


def test_names_are_those_of_pytest(coverage, project):
    results = coverage.junit.results([project / "run.xml"])
    assert {result.test: result.outcome for result in results} == {
        "tests/a/test_x.py::test_one[1-a.b]": "passed",
        "tests/a/test_x.py::test_one[2]": "skipped",
        "tests/a/test_x.py::test_one_more": "failed",
        "tests/a/test_x.py::TestIt::test_two": "failed",
    }


def test_level_passes_only_if_all_its_tests_passed(coverage, project):
    assert coverage.main([str(project / "run.xml")], project) == 0
    first, second = (project / "docs" / "development" / "coverage.md").read_text().splitlines()[-2:]
    assert "1 passed, 1 skipped (2026-01-02" in first
    assert "1 failed (2026-01-02" in first
    assert first.endswith("| L0 |")
    assert second == "| A2 | second |  |  |  |  |"
    assert coverage.main(["--check"], project) == 0


def test_later_run_of_other_tests_keeps_the_result(coverage, project):
    coverage.main([str(project / "run.xml")], project)
    (project / "run.xml").write_text('<testsuites><testsuite timestamp="2027"/></testsuites>')
    before = (project / "docs" / "development" / "coverage.md").read_text()
    coverage.main([str(project / "run.xml")], project)
    assert (project / "docs" / "development" / "coverage.md").read_text() == before


def test_never_run_is_not_passed(coverage, project):
    coverage.main([], project)
    first = (project / "docs" / "development" / "coverage.md").read_text().splitlines()[-2]
    assert first.endswith("| never run<br>never run |  |")


def test_changed_page_is_reported(coverage, project, capsys):
    coverage.main([], project)
    page = project / "docs" / "development" / "coverage.md"
    page.write_text(page.read_text().replace("never run |  |", "never run | L4 |"))
    assert coverage.main(["--check"], project) == 1
    assert "docs/development/coverage.md is not what" in capsys.readouterr().err


def test_missing_tests_are_reported(coverage, project, capsys):
    mission = project / "docs" / "development" / "mission.yaml"
    text = mission.read_text()
    for gone in (
        "tests/a/test_y.py",
        "tests/a/test_x.py::test_three",
        "tests/a/test_x.py::TestIt::test_no",
    ):
        mission.write_text(text.replace("tests/a/test_x.py::TestIt", gone))
        assert coverage.main([], project) == 1
        assert gone in capsys.readouterr().err


def test_page_of_the_project_is_current(coverage):
    assert coverage.main(["--check"]) == 0, "run `make coverage-docs`"
