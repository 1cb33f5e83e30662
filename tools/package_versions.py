"""Keep what the tests gave with other versions of the packages that Plait depends on, and write the page about it.

    python -m tools.package_versions lowest RESULT.xml ...    in an environment, with the JUnit files of its tests
    python -m tools.package_versions                          docs/versions-packages.md again

tools/packages.sh makes the environments and calls this. A run of other tests than its set says so by --tests.
"""

from __future__ import annotations

import argparse
import json
import platform
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.common.table import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions" / "packages.json"
PAGE = ROOT / "docs" / "versions-packages.md"
EXTRAS = ("hf", "peft", "trl", "viz")
INTRODUCTION = """# Versions of Python, Transformers and other packages

`make versions-lowest` and `make versions-newest` run a set of tests with the lowest and the newest packages that
`pyproject.toml` allows, each in an environment of its own: models, generation, the configuration, the command line, checkpoints,
the quickstart, the Trainer, LoRA, and TRL's SFT and DPO trainers. `bash tools/packages.sh newest transformers==5.20.0` fixes one
package. The table has every run that was recorded, with the tests that it took. Releases of torch are in [versions](versions.md).

Plait needs Transformers 5.17 or newer, and refuses an older one by name. With 5.0.0, 61 of 783 tests of models and generation
failed: among others, tied weights stay apart in models that are built without memory. With 5.10.1, 29 failed: among others, the
sizes of KV caches, and the tokens of models whose rotary frequencies follow the length.
"""


def requirements() -> list[Requirement]:
    """Return what Plait and the extras of this page depend on, by pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"]]
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def counts(results: Iterable[Path]) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, and the names of those that failed."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for path in results:
        for case in ElementTree.parse(path).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                found["failed"] += 1
                found["failures"].append(f"{case.get('classname')}::{case.get('name')}")
            elif case.find("skipped") is not None:
                found["skipped"] += 1
            else:
                found["passed"] += 1
    return found


def installed() -> dict[str, str]:
    """Return the versions of Plait's dependencies in this environment, keyed by their names in pyproject.toml."""
    found = {}
    for requirement in requirements():
        try:
            found[requirement.name] = version(requirement.name)
        except PackageNotFoundError:
            continue
    return dict(sorted(found.items(), key=lambda entry: entry[0].lower()))


def page(rows: dict[str, Any]) -> str:
    """Return the document."""
    runs = []
    for name, row in rows.items():
        packages = row["packages"]
        tests = [row["tests"], *(str(row[outcome]) for outcome in ("passed", "failed", "skipped"))]
        runs.append([name, row["python"], packages["torch"], packages.get("transformers", ""), *tests])
    header = ["run", "Python", "torch", "Transformers", "tests", "passed", "failed", "skipped"]
    parts = [INTRODUCTION, markdown(header, runs)]

    # torch has a page of its own.
    bounds = {requirement.name: str(requirement.specifier) for requirement in requirements() if requirement.name != "torch"}
    ends = [rows[name]["packages"] for name in ("lowest", "newest") if name in rows]
    versions = [[f"`{name}`", f"`{bound}`", *(end.get(name, "") for end in ends)] for name, bound in bounds.items()]
    versions.sort(key=lambda line: line[0].lower())
    parts.append(markdown(["package", "pyproject.toml", *(name for name in ("lowest", "newest") if name in rows)], versions))

    for name, row in rows.items():
        if row["failures"]:
            parts.append(f"Failed with {name}:\n\n" + "\n".join(f"- `{failure}`" for failure in row["failures"]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def main() -> None:
    """Record a run where one is given, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="what the row is called")
    parser.add_argument("results", nargs="*", type=Path, help="JUnit files")
    parser.add_argument("--tests", default="the set", help="which tests ran")
    given = parser.parse_args()

    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    if given.name:
        facts = {"python": platform.python_version(), "packages": installed(), "tests": given.tests}
        rows[given.name] = facts | counts(given.results)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
