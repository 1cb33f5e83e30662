"""What several test modules need is in modules of its own."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(r"^\s*(?:from (tests\S*) import ([^\n]*)|import (tests\S*))", re.MULTILINE)


def test_no_module_imports_a_test_module() -> None:
    """Or to change a test is to change others, and its file is imported under two names."""
    files = [
        file
        for folder in ("tests", "tools", "benchmarks")
        for file in (ROOT / folder).rglob("*.py")
    ]
    wrong = []
    for file in files:
        for found in IMPORT.finditer(file.read_text(encoding="utf-8")):
            names = (
                " ".join(part for part in found.groups() if part)
                .replace(".", " ")
                .replace(",", " ")
                .split()
            )
            module = (found[1] or found[3]).split(".")
            if module[-1].startswith("test_") or (
                ROOT.joinpath(*module).is_dir() and any(name.startswith("test_") for name in names)
            ):
                wrong.append(f"{file.relative_to(ROOT)}: {found[0].strip()}")
    assert len(files) > 200 and not wrong, "\n".join(wrong)
