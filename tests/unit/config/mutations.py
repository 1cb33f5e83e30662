"""Configurations that are wrong in ways that nobody lists: files of the kinds that projects publish, changed at random from a seed."""

from __future__ import annotations

import copy
import json
import math
import random
from typing import Any

from tests.unit.config.cases import ACCEPTED, REFUSED

TRAINED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": "auto", "warmup_num_steps": 2},
    },
    "parallel": {"tp": 1, "recompute": {"mode": "none"}, "pipeline": {"schedule": "1f1b"}},
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
        }
    },
    "data": {"source": "python-stdlib", "vocab_size": 1024, "sequence_length": 32},
    "run": {"folder": "runs/mutated", "steps": 4, "seed": 0, "processes": 1},
}
BASES = [TRAINED, *(row["file"] for row in (ACCEPTED | REFUSED).values())]

LONG = "9" * 5000
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 7, 0.5, -0.25, 1e-9, 1e300, 2**31, 2**40, 2**63, 10**18, 10**29, 10**320,
    math.inf, -math.inf, math.nan, "", " ", "auto", "x", "8", "1e-4", "true", "nan", "1e999", "-1", "\ud800", "\x00", "a\x00b",
    "\u202e", "é", "x" * 3000, LONG, [], {}, [[]], [1, "x", None], [0.9], {"enabled": True}, {"stage": 3}, {"": 1}, [{}], "none", "cpu",
)  # fmt: skip
TEXTS = ("{", "}", "[", "]", ",", ":", '"', "\\", "\\ud800", "//", "/*", "#", "\n", "\t", "\x00", "&a", "*a", "!!int ", "- ", "? ", "| ",
"é", LONG, "[" * 3000, '{"a":' * 1500, "1e", "0x1", "-")  # fmt: skip


def places(tree, at=()):
    """Paths of everything inside, not deeper than a file goes."""
    if len(at) > 8:
        return []
    inside = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [path for key, value in inside for path in ((*at, key), *places(value, (*at, key)))]


def change(draw, tree):
    """One change of the tree, in place."""
    path = draw.choice(places(tree) or [("train_batch_size",)])
    here: Any = tree
    for key in path[:-1]:
        here = here[key]
    kind, key = draw.randrange(8), path[-1]
    if kind < 4:
        here[key] = copy.deepcopy(draw.choice(VALUES))
    elif kind == 4 and isinstance(here, dict):
        name = str(key)
        at = draw.randrange(len(name) + 1)
        here[
            name[:at]
            + draw.choice(["", "x", "_", ".", " ", "\ud800", "\x00", "-"])
            + name[at + 1 :]
        ] = here.pop(key)
    elif kind == 5:
        del here[key]
    elif kind == 6:
        here[key] = (
            {"a": {"b": {"c": here[key]}}} if draw.random() < 0.5 else [here[key], here[key]]
        )
    elif isinstance(here, dict):
        deep: Any = draw.choice(VALUES)
        for _ in range(draw.choice([3, 70, 400])):
            deep = {"x": deep}
        here[
            draw.choice(
                ["model", "parallel", "zero_optimization", "optimizer", "run", "data", "fp16", "x"]
            )
        ] = deep


def mutated(seed, *, trained=False):
    """(ending, content, values of --set). trained: of a file that `plait train` runs."""
    draw = random.Random(seed)
    tree = copy.deepcopy(TRAINED if trained else draw.choice(BASES))
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        change(draw, tree)
    text = json.dumps(tree, indent=draw.choice([None, 1]))
    if draw.random() < 0.35:
        for _ in range(draw.choice([1, 1, 2, 5])):
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(TEXTS) + text[at + draw.choice([0, 0, 1, 9]) :]
    content = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.03:
        content = (
            content[: len(content) // 2]
            + bytes([draw.randrange(256) for _ in range(3)])
            + content[len(content) // 2 :]
        )
    overrides = []
    if draw.random() < 0.3:
        path = ".".join(
            str(key) for key in draw.choice(places(tree) or [("x",)]) if isinstance(key, str)
        )
        value = draw.choice(
            [*map(str, VALUES[:40]), *TEXTS, "[" * 2000, "{a: " * 800, '{"stage": 3}', "null"]
        )
        overrides.append(f"{path}={value}".replace("\x00", draw.choice(["", "\udc80"])))
    return draw.choice([".json", ".json", ".yaml"]), content, overrides
