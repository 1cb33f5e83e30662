"""Record test results with other versions of Plait's dependencies, and write docs/development/versions-packages.md.

    python -m tools.package_versions lowest RESULT.xml ...    record a run of this environment
    python -m tools.package_versions                          write the page only

tools/packages.sh makes the environments and calls this. The RESULT.xml are JUnit files of pytest. A run
of other tests than those of tools/packages.sh describes them with --tests.
"""

from __future__ import annotations

import argparse
import json
import platform
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from benchmarks.common.report import ROOT, markdown, today
from tools import junit

RESULTS = ROOT / "benchmarks" / "results" / "versions" / "packages.json"
PAGE = ROOT / "docs" / "development" / "versions-packages.md"
EXTRAS = ("hf", "peft", "trl", "viz")
INTRODUCTION = """# Versions of Python, Transformers and other packages

Plait needs Python 3.11 and Transformers 5.17, or newer releases. An older Transformers is refused
with an error that states the installed version and the command that installs a newer one, because
5.0.0 does not share tied weights in models that are built on the meta device, and with 5.10.1
Plait computes wrong sizes of KV caches, and wrong tokens of models with dynamic RoPE.

```bash
make versions-lowest     # tests with the lowest packages that pyproject.toml allows
make versions-newest     # tests with the newest packages, pre-releases included
bash tools/packages.sh newest transformers==5.20.0    # the newest packages with one that is fixed
```

Each command makes a separate environment, and runs the tests of models, generation, the
configuration, the command line, checkpoints, the quickstart, the Trainer, LoRA, and TRL's SFT and
DPO trainers. The table has one row per environment; the row of Debian 12 has its Python 3.11.2 with
the packages of requirements.lock. Releases of torch are on a [separate page](versions.md).
"""


def requirements() -> list[Requirement]:
    """Return the dependencies of Plait and of `EXTRAS` from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"]]
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def counts(paths: Iterable[Path]) -> dict[str, Any]:
    """Return how many tests passed, failed and were skipped, and the names of those that failed."""
    results = list(junit.results(paths))
    failures = [result.test for result in results if result.outcome == "failed"]
    return {**junit.counts(results), "failures": failures}


def installed() -> dict[str, str]:
    """Return the versions of Plait's dependencies in this environment, keyed by their names in pyproject.toml."""
    versions = {}
    for requirement in requirements():
        try:
            versions[requirement.name] = version(requirement.name)
        except PackageNotFoundError:
            continue
    return dict(sorted(versions.items(), key=lambda entry: entry[0].lower()))


def page(rows: dict[str, Any]) -> str:
    """Return the text of the page for the recorded runs `rows`."""
    header = [
        "run",
        "date",
        "Python",
        "torch",
        "Transformers",
        "tests",
        "passed",
        "failed",
        "skipped",
    ]
    runs = []
    for name, row in rows.items():
        packages = row["packages"]
        versions = [row["python"], packages["torch"], packages.get("transformers", "")]
        outcomes = [str(row[outcome]) for outcome in ("passed", "failed", "skipped")]
        runs.append([name, row["date"], *versions, row["tests"], *outcomes])
    parts = [INTRODUCTION, markdown(header, runs)]

    # Releases of torch are on another page.
    bounds = {
        requirement.name: str(requirement.specifier)
        for requirement in requirements()
        if requirement.name != "torch"
    }
    sets = [name for name in ("lowest", "newest") if name in rows]
    bound_rows = []
    for package, bound in sorted(bounds.items(), key=lambda entry: entry[0].lower()):
        installed_versions = [rows[name]["packages"].get(package, "") for name in sets]
        bound_rows.append([f"`{package}`", f"`{bound}`", *installed_versions])
    parts.append(markdown(["package", "pyproject.toml", *sets], bound_rows))

    for name, row in rows.items():
        if row["failures"]:
            failures = "\n".join(f"- `{failure}`" for failure in row["failures"])
            parts.append(f"Failed with {name}:\n\n{failures}")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def main() -> None:
    """Record a run if a name is passed, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="name of the run in the table")
    parser.add_argument("results", nargs="*", type=Path, help="JUnit files")
    parser.add_argument(
        "--tests", default="those of tools/packages.sh", help="description of the tests that ran"
    )
    arguments = parser.parse_args()

    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    if arguments.name:
        environment = {
            "date": today(),
            "python": platform.python_version(),
            "packages": installed(),
            "tests": arguments.tests,
        }
        rows[arguments.name] = environment | counts(arguments.results)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
