"""Tables, shorthand and set-up for the tests of configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from plait.config.resolving.resolve import load as load
from plait.config.resolving.resolve import resolve
from plait.config.source import parse_override
from plait.errors import ConfigError
from tests.table import check_rows

BATCH = {"train_micro_batch_size_per_gpu": 2}
CALLER = {"train_micro_batch_size_per_gpu": 2, "bf16.enabled": True}

ABBREVIATIONS = {
    "ZERO.": "zero_optimization.",
    "OPT.": "zero_optimization.offload_optimizer.",
    "PARAM.": "zero_optimization.offload_param.",
}


def read_samples(name):
    """Return the sections of a YAML file of this folder: tables keyed by the sample's name."""
    content: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
        Path(__file__).with_name(name).read_text(encoding="utf-8")
    )
    return content


ACCEPTED, REFUSED = read_samples("published.yaml").values()


def tree_of(settings):
    """Return the tree of a file, given its settings by their dotted paths."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *parents, last = path.split(".")
        section = tree
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return tree


def parse_settings(text):
    """Return settings by dotted path, from text like `parallel.tp=2 ZERO.stage=1`."""
    for short, full in ABBREVIATIONS.items():
        text = text.replace(short, full)
    return {".".join(path): value for path, value in map(parse_override, text.split())}


def parse_tree(text):
    """Return the tree of a file with the settings of a text. See `parse_settings`."""
    return tree_of(parse_settings(text))


def parse_rows(text):
    """Return the rows `left -> right` of a table, keyed by the line."""
    rows = {}
    for line in text.strip().splitlines():
        # A backslash in the source joins two lines, and leaves the indentation of the second.
        line = " ".join(line.split())
        left, _, right = line.partition(" -> ")
        rows[line] = (left, right)
    return rows


def check_refusals(text, use):
    """Check that each left side is refused with the texts on the right, which `...` separates.

    Args:
        text: A table. See `parse_rows`.
        use: Receives the left side, and raises the error.
    """

    def check(row):
        left, message = row
        with pytest.raises((ConfigError, ValidationError)) as error:
            use(left)
        for part in message.split(" ... "):
            assert part in str(error.value)

    check_rows(parse_rows(text), check)


def resolve_tree(tree, *overrides, world_size=4, **context):
    """Return a resolved file, by default for 4 processes with a micro-batch of 2."""
    return resolve(load({**BATCH, **tree}, overrides), world_size=world_size, **context)


def status_of(config, key):
    """Return the status of a key of the file."""
    (row,) = [row for row in config.provenance.rows if row.key == key]
    return str(row.status)


def leaf_paths(tree, prefix=""):
    """Yield the dotted paths of all values that are not objects."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaf_paths(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
