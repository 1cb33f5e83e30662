"""Record test results with other versions of Plait's dependencies, and write the page
docs/development/versions-packages.md.

    python -m tools.package_versions lowest RESULT.xml ...    record a run of this environment
    python -m tools.package_versions                          write the page only

tools/packages.sh makes the environments and calls this. The RESULT.xml are JUnit files of pytest.
A run of other tests than those of tools/packages.sh describes them with --tests.
"""

import argparse
import json
import platform
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.common.report import ROOT, markdown, read, today, version_of, with_sections
from tools import junit

RESULTS = ROOT / "benchmarks" / "results" / "versions" / "packages.json"
PAGE = ROOT / "docs" / "development" / "versions-packages.md"
EXTRAS = ("hf", "peft", "trl", "viz")
OUTCOMES = ("passed", "failed", "skipped")


def requirements() -> dict[str, Requirement]:
    """Return the dependencies of Plait and of `EXTRAS` from pyproject.toml, ordered by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"]]
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    by_name = {requirement.name: requirement for requirement in map(Requirement, lines)}
    return dict(sorted(by_name.items(), key=lambda entry: entry[0].lower()))


def counts(paths: Iterable[Path]) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, and the names of those that failed."""
    results = list(junit.results(paths))
    failures = [result.test for result in results if result.outcome == "failed"]
    return {**junit.counts(results), "failures": failures}


def sections(rows: dict[str, Any]) -> dict[str, str]:
    runs = []
    failures = ""
    for name, row in rows.items():
        packages = row["packages"]
        versions = [row["python"], packages["torch"], packages.get("transformers", "")]
        outcomes = [str(row[outcome]) for outcome in OUTCOMES]
        runs.append([name, row["date"], *versions, row["tests"], *outcomes])
        if row["failures"]:
            names = "\n".join(map("- `{}`".format, row["failures"]))
            failures += f"\nFailed with {name}:\n\n{names}\n"

    bounds = [name for name in ("lowest", "newest") if name in rows]
    packages = []
    for name, requirement in requirements().items():
        if name != "torch":  # its releases are on another page
            installed = [rows[bound]["packages"].get(name, "") for bound in bounds]
            packages.append([f"`{name}`", f"`{requirement.specifier}`", *installed])
    header = ["run", "date", "Python", "torch", "Transformers", "tests", *OUTCOMES]
    return {
        "runs": markdown(header, runs) + failures,
        "packages": markdown(["package", "pyproject.toml", *bounds], packages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="name of the run in the table")
    parser.add_argument("results", nargs="*", type=Path, help="JUnit files")
    usual = "those of tools/packages.sh"
    parser.add_argument("--tests", default=usual, help="description of the tests that ran")
    options = parser.parse_args()

    rows = read(RESULTS, {})
    if options.name:
        versions = {}
        for name in requirements():
            version = version_of(name)
            if version:
                versions[name] = version
        rows[options.name] = {
            "date": today(),
            "python": platform.python_version(),
            "packages": versions,
            "tests": options.tests,
            **counts(options.results),
        }
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_sections(PAGE, sections(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
