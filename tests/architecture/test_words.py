"""Plait speaks the language of its field: coined words and phrases, which only their author understands, do not come back.

Each rule forbids one phrase and names the field's term. It is searched in the documents, in every string, docstring and comment of the
package, and in its identifiers; words that also have a plain meaning ("whole", "trial") are only forbidden where the coined one is meant.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SOURCE = sorted((ROOT / "src" / "plait").rglob("*.py"))
TOOLS = sorted(path for folder in ("tools", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FULL = r"gradients?|parameters?|weights?|tensors?|logits|blocks?|matri(x|ces)|sums?|shapes?|steps?|states?|units?|layers?|vocabulary"
RULES = {
    r"\bforet(ell|old)\w*": "predict",
    r"\bforecast\w*": "prediction",
    r"\brehears\w*": "single-rank dry run",
    r"\b(gives?|gave|given|giving|hand(s|ed)?) (\w+ )?back\b": "returns, releases, reshards",
    r"\b(comes?|came|coming) back\b": "is returned, recomputed, prefetched",
    r"\bput(s|ting)? (\w+ ){0,4}(away|off)\b": "evict; defer",
    r"\bhand(s|ed|ing)? (\w+ )?(on|over)\b": "pass, send; boundary activations",
    r"\bway back\b": "backward, prefetch",
    r"\bsecond cop(y|ies)\b": "secondary partition (hpZ)",
    r"\b(held|holds?) once\b": "in shared memory, zero-copy",
    r"\b(stood|stands?) (waiting|still)\b": "exposed communication time",
    r"\btwo[- ]levels?\b|\bby machines\b|\blevels of (links|the group|a group)\b": "hierarchical; intra-node and inter-node group",
    r"\bdeal(s|t|ing)? out\b": "partition",
    r"\bstand-?ins?\b": "placeholder",
    r"\bcontestants?\b": "baseline, candidate",
    r"\bbooked\b": "allocated, rented",
    r"\bis no key that\b": "unknown key",
    r"\bno meaning here\b|\bmeaningless\b": "ignored",
    r"\bfor people\b|\bin words\b": "summary, description",
    r"\bloops? of \w+('s)? own\b|\ban own\b": "your own training loop",
    r"\bwho (sits|is) where\b|\bwho (computes|does) what\b": "the ranks on the machines; timeline",
    r"(?-i:\bWho (has|wants|needs|looks|gives|reads|calls|changes)\b)": "a sentence with a subject",
    rf"\bwhole ({_FULL})\b|\b(stays?|leaves?|left|kept|keeps?|is|are|be) whole\b(?! number)": "full, unsharded, uncompressed",
    r"\bsmall states?\b|\baverages? of (gradients|squares)\b|\btwo averages\b": "low-bit states; moments",
    r"\bmasters\b|\bmaster parameters?\b": "master weights",
    r"\bverdicts?\b": "result, decision",
    r"\bsettle[sd]?\b": "resolve, decide",
    r"\bwiring\b|\bwired\b": "collective selection",
    r"\btrials?\b": "autotuning, candidate",
    r"\bbeside (the |a |its |their )?(backward|forward|comput\w+|products?)\b": "overlapped with",
    r"\bentrances?\b|\bdoors?\b": "copy to the tensor-parallel region",
    r"\b(bits?|bytes?) a number\b|\b\d[\d,]+ numbers\b|\b(blocks?|rows?) of (\{?\w*\}? )?numbers\b": "elements",
    r"\b(loss|logits|batch|file) in pieces\b|\ba piece at a time\b": "chunks, micro-batches",
    r"\bjudg(e|es|ed|ing)\b": "compare, reference",
    r"\blift(s|ed|ing)?\b": "keep in float64",
    r"\b(is|are|was) said\b|\bsaid so\b": "is printed, reported",
    r"\bwish(es|ed)?\b": "query",
    r"\btravel(s|led|ling)?\b": "is sent",
    r"\bwalk(s|ed|ing)? (over|through)\b": "iterates over",
}
"""Pattern, where case does not count, and what to write instead."""

NAMES = re.compile(
    r"(^|_)(foretell|foretold|forecast|rehears\w*|(hold|held)_once|stand_ins?|contestants?|verdicts?|nowhere|elsewhere|two_level|second_copy|"
    r"by_machines|settled?|wiring|doors?|entrances?|alike_over_tp|downwards|for_people|way_back|put_(away|off)|give_back|subjects?|judged?|"
    r"lift(ed)?|wish(es)?|trials?|masters|tail)(_|$)"
)
"""In a name in snake case."""


@cache
def _compiled() -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in RULES.items()]


def _found(text: str) -> Iterator[str]:
    for pattern, instead in _compiled():
        for match in pattern.finditer(text):
            yield f"{match[0]!r} (write: {instead})"


def _without_code(text: str) -> str:
    """Without code spans and blocks, whose words are keys, names and paths."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


@cache
def _prose(path: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(line, text) of every string that a user may see, and of every docstring and block of comments. The lines of a text are one, so that
    a phrase is found across them."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    messages, comments = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            (comments if id(node) in statements else messages).append((node.lineno, " ".join(node.value.split())))
    block: list[str] = []
    began = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1:
            comments.append((began, " ".join(block)))
            block, began = [], token.start[0]
        block.append(token.string.lstrip("# "))
        last = token.start[0]
    return messages, [*comments, (began, " ".join(block))]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_pages(path: Path) -> None:
    lines = _without_code(path.read_text(encoding="utf-8")).splitlines()
    bad = [f"{_name(path)}:{number}: {found}" for number, line in enumerate(lines, 1) for found in _found(line)]
    bad += [f"{_name(path)}: across lines: {found}" for found in _found(" ".join(lines)) if not any(found in one for one in bad)]
    assert not bad, "\n".join(bad)


def test_what_pages_are_made_from() -> None:
    """The statements of docs/coverage.md and the rows of docs/mutants.md."""
    bad = []
    for path in (ROOT / "docs" / "mission.yaml", *sorted((ROOT / "tools" / "mutants" / "defects").glob("*.yaml"))):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            bad += [f"{_name(path)}: {entry['id']}: {found}" for found in _found(entry.get("what") or entry["statement"])]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("kind", ["messages", "docstrings and comments"])
def test_texts_of_the_sources(kind: str) -> None:
    """Messages are all strings, hence the help of the commands and the names of metrics and keys too."""
    which = ["messages", "docstrings and comments"].index(kind)
    bad = [
        f"{_name(path)}:{line}: {found}"
        for path in [*SOURCE, *TOOLS]
        for line, text in _prose(path)[which]
        for found in _found(_without_code(text))
    ]
    assert not bad, f"{len(bad)}:\n" + "\n".join(bad)


def _names(path: Path) -> Iterator[str]:
    """What a module defines: its own name, classes, functions, parameters, variables and attributes."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_names() -> None:
    snake = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
    bad = sorted({f"{_name(path)}: {name}" for path in SOURCE for name in _names(path) if NAMES.search(snake.sub("_", name).lower())})
    assert not bad, "\n".join(bad)
