"""Results of tests in the JUnit files of `pytest --junitxml` (family xunit1)."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Result(NamedTuple):
    """Result of one test."""

    test: str
    """Node id of pytest: `tests/a.py::Class::test_name[case]`."""
    outcome: str
    """`passed`, `failed` or `skipped`."""
    seconds: float
    properties: dict[str, str]
    """Values that the test recorded by `record_property`."""


def results(paths: Iterable[Path]) -> Iterator[Result]:
    """Yield all results. A file that was skipped as a whole has an empty name."""
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            outcome = "passed"
            if case.find("failure") is not None or case.find("error") is not None:
                outcome = "failed"
            elif case.find("skipped") is not None:
                outcome = "skipped"
            properties = {}
            for entry in case.iter("property"):
                properties[entry.get("name", "")] = entry.get("value", "")
            yield Result(_name(case), outcome, float(case.get("time", "0")), properties)


def _name(case: ElementTree.Element) -> str:
    file = case.get("file", "")
    module = file.removesuffix(".py").replace("/", ".")
    owner = case.get("classname", "").removeprefix(module).strip(".").replace(".", "::")
    return "::".join(filter(None, (file, owner, case.get("name", ""))))


def counts(tests: Iterable[Result]) -> dict[str, int]:
    counter = Counter(passed=0, failed=0, skipped=0)
    counter.update(result.outcome for result in tests)
    return dict(counter)


def began(path: Path) -> str:
    """Return when a run began, as a text that sorts, or an empty one."""
    return next(ElementTree.parse(path).iter("testsuite")).get("timestamp", "")
