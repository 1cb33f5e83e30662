"""Random changes of published configurations, for errors that no table lists."""

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

LONG_NUMBER = "9" * 5000
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 7, 0.5, -0.25, 1e-9, 1e300, 2**31, 2**40, 2**63, 10**18, 10**29,
    10**320, math.inf, -math.inf, math.nan, "", " ", "auto", "x", "8", "1e-4", "true", "nan",
    "1e999", "-1", "\ud800", "\x00", "a\x00b", "\u202e", "é", "x" * 3000, LONG_NUMBER, [], {}, [[]],
    [1, "x", None], [0.9], {"enabled": True}, {"stage": 3}, {"": 1}, [{}], "none", "cpu",
)  # fmt: skip
SNIPPETS = (
    "{", "}", "[", "]", ",", ":", '"', "\\", "\\ud800", "//", "/*", "#", "\n", "\t", "\x00", "&a",
    "*a", "!!int ", "- ", "? ", "| ", "é", LONG_NUMBER, "[" * 3000, '{"a":' * 1500, "1e", "0x1",
    "-",
)  # fmt: skip
SECTIONS = ["model", "parallel", "zero_optimization", "optimizer", "run", "data", "fp16", "x"]


def paths_inside(tree, prefix=()):
    """Return the paths of all values inside a tree, up to the depth that files have."""
    children: Any = ()
    if len(prefix) > 8:
        return []
    if isinstance(tree, dict):
        children = tree.items()
    elif isinstance(tree, list):
        children = enumerate(tree)

    paths = []
    for key, value in children:
        path = (*prefix, key)
        paths += [path, *paths_inside(value, path)]
    return paths


def change(draw, tree):
    """Change one value or name of a tree in place."""
    path = draw.choice(paths_inside(tree) or [("train_batch_size",)])
    container: Any = tree
    for key in path[:-1]:
        container = container[key]

    kind = draw.randrange(8)
    key = path[-1]
    if kind < 4:
        container[key] = copy.deepcopy(draw.choice(VALUES))
    elif kind == 4 and isinstance(container, dict):
        name = str(key)
        position = draw.randrange(len(name) + 1)
        letter = draw.choice(["", "x", "_", ".", " ", "\ud800", "\x00", "-"])
        container[name[:position] + letter + name[position + 1 :]] = container.pop(key)
    elif kind == 5:
        del container[key]
    elif kind == 6 and draw.random() < 0.5:
        container[key] = {"a": {"b": {"c": container[key]}}}
    elif kind == 6:
        container[key] = [container[key], container[key]]
    elif isinstance(container, dict):
        nested: Any = draw.choice(VALUES)
        for _ in range(draw.choice([3, 70, 400])):
            nested = {"x": nested}
        container[draw.choice(SECTIONS)] = nested


def mutated(seed, *, trained=False):
    """Return a mutated file.

    Args:
        seed: Determines the file.
        trained: Whether to change a file that `plait train` runs, and not any published one.

    Returns:
        The ending of the file, its content, and values of `--set`.
    """
    draw = random.Random(seed)
    tree = copy.deepcopy(TRAINED if trained else draw.choice(BASES))
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        change(draw, tree)

    text = json.dumps(tree, indent=draw.choice([None, 1]))
    if draw.random() < 0.35:
        for _ in range(draw.choice([1, 1, 2, 5])):
            start = draw.randrange(len(text) + 1)
            text = text[:start] + draw.choice(SNIPPETS) + text[start + draw.choice([0, 0, 1, 9]) :]

    content = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.03:
        middle = len(content) // 2
        noise = bytes([draw.randrange(256) for _ in range(3)])
        content = content[:middle] + noise + content[middle:]

    overrides = []
    if draw.random() < 0.3:
        path = draw.choice(paths_inside(tree) or [("x",)])
        key = ".".join(name for name in path if isinstance(name, str))
        nested = ["[" * 2000, "{a: " * 800, '{"stage": 3}', "null"]
        value = draw.choice([*map(str, VALUES[:40]), *SNIPPETS, *nested])
        overrides.append(f"{key}={value}".replace("\x00", draw.choice(["", "\udc80"])))
    return draw.choice([".json", ".json", ".yaml"]), content, overrides
