"""Plait's sections in a DeepSpeed file change the values that they set, and what follows from them.

No other number changes.
"""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import strategies as st

from plait.config.resolving.explain import values_of
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import ACCEPTED, CALLER

SECTIONS: dict[str, list[dict[str, Any]]] = {
    "parallel": [
        {},
        {"tp": 2},
        {"pp": 2},
        {"cp": 2},
        {"recompute": {"mode": "full"}},
        {"sequence_parallel": False},
        {"transport": "torch"},
    ],
    "run": [{}, {"steps": 7}, {"log_every": 3}, {"folder": "elsewhere"}],
    "model": [
        {"config": {"model_type": "llama", "hidden_size": 64}},
        {"path": "somewhere", "dtype": "bfloat16"},
    ],
    "data": [
        {"source": "python-stdlib"},
        {"source": "files", "paths": ["corpus"], "sequence_length": 64},
    ],
    "experts": [{}, {"z_loss": 0.001}],
    "faults": [{}, {"timeout_seconds": 60}, {"non_finite": "raise"}],
}
LAYOUT = (
    "train_batch_size",
    "gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu",
    "parallel.dp_replicate",
    "parallel.dp_shard",
    # A partition over all of dp_shard is none.
    "parallel.secondary_partition",
)
DERIVED = {
    "tp": LAYOUT,
    "pp": (*LAYOUT, "parallel.pipeline."),
    "cp": (*LAYOUT, "parallel.context"),
    "non_finite": ("precision.check_overflow",),
}
"""Prefixes of the values that follow from a key."""


def resolved_values(tree):
    """Return every resolved value for four processes, by name."""
    resolved = resolve(load(tree), world_size=4, auto=CALLER, total_steps=50)
    return {value.name: value.value for value in values_of(dict(resolved), resolved.sources)}


@st.composite
def additions(draw):
    """Draw the name of a file, and sections to add to it."""
    names = draw(st.sets(st.sampled_from(sorted(SECTIONS)), min_size=1))
    sections = {name: draw(st.sampled_from(SECTIONS[name])) for name in sorted(names)}
    return draw(st.sampled_from(sorted(ACCEPTED))), sections


@hypothesis.settings(max_examples=30)
@hypothesis.given(additions())
def test_no_other_number_changes(addition):
    name, sections = addition
    file = ACCEPTED[name]["file"]
    before = resolved_values(file)

    extended = dict(file)
    may_change = []
    for section, keys in sections.items():
        extended[section] = {**file.get(section, {}), **keys}
        for key in keys:
            may_change += [f"{section}.{key}", *DERIVED.get(key, ())]
    try:
        after = resolved_values(extended)
    except ConfigError as error:
        # A refusal is fine too, if it explains itself.
        assert all(problem.rule and problem.remedy for problem in error.problems)
        return

    for key, value in before.items():
        assert after[key] == value or key.startswith(tuple(may_change)), key


def check_empty_sections(file):
    """Check that a file resolves to the same values with each empty section that it lacks."""
    before = resolved_values(file)
    for section in {"parallel", "run", "experts", "faults"} - set(file):
        assert resolved_values({**file, section: {}}) == before, section


def test_an_empty_section_changes_nothing():
    check_rows({name: row["file"] for name, row in ACCEPTED.items()}, check_empty_sections)
