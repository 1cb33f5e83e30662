"""Files and short names for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from plait.config.resolving.resolve import load as load
from plait.config.resolving.resolve import resolve
from plait.config.source import parse_override

BATCH = {"train_micro_batch_size_per_gpu": 2}
CALLER = {"train_micro_batch_size_per_gpu": 2, "bf16.enabled": True}


def read(name):
    """Return a table of this folder: section, name, and what a row says."""
    content: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
        Path(__file__).with_name(name).read_text(encoding="utf-8")
    )
    return content


ACCEPTED, REFUSED = read("published.yaml").values()


def tree_of(settings):
    """Return the file of dotted settings."""
    tree: dict[str, Any] = {}
    for path, value in settings.items():
        *parents, last = path.split(".")
        place = tree
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return tree


def written(text):
    """Return the file of settings as `--set` takes them: `parallel.tp=2 optimizer.type=SGD`."""
    return tree_of({".".join(path): value for path, value in map(parse_override, text.split())})


def rows(text):
    """Return the lines `left -> right` of a table."""
    pairs = {line.strip(): line.partition(" -> ") for line in text.strip().splitlines()}
    return {line: (left.strip(), right.strip()) for line, (left, _, right) in pairs.items()}


def resolved(tree, *overrides, world_size=4, **context):
    """`tree` with a micro batch of 2 where it gives none, for 4 processes."""
    return resolve(load({**BATCH, **tree}, overrides), world_size=world_size, **context)


def status_of(config, key):
    """What the file's `key` means."""
    (row,) = [row for row in config.provenance.rows if row.key == key]
    return str(row.status)


def leaves(tree, at=""):
    """The dotted paths of all values."""
    found = []
    for name, value in tree.items():
        found += leaves(value, f"{at}{name}.") if isinstance(value, dict) else [f"{at}{name}"]
    return found
