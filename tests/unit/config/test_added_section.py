"""Adding a section of Plait's to a DeepSpeed file changes the values that it gives, what follows from them, and no other number."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.config.resolving.explain import values_of
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError
from tests.table import check_rows
from tests.unit.config.cases import ACCEPTED, CALLER, written

SECTIONS: dict[str, list[dict[str, Any]]] = {
    "parallel": list(map(written, ("", "tp=2", "pp=2", "cp=2", "recompute.mode=full", "sequence_parallel=false", "transport=torch"))),
    "run": [{}, {"steps": 7}, {"log_every": 3}, {"folder": "elsewhere"}],
    "model": [{"config": {"model_type": "llama", "hidden_size": 64}}, {"path": "somewhere", "dtype": "bfloat16"}],
    "data": [{"source": "python-stdlib"}, {"source": "files", "paths": ["corpus"], "sequence_length": 64}],
    "experts": [{}, {"z_loss": 0.001}],
    "faults": [{}, {"timeout_seconds": 60}, {"non_finite": "raise"}],
}  # fmt: skip
SIZES = ("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
LAYOUT = (
    *SIZES,
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.secondary_partition",
)  # the last is off over all of dp_shard
FOLLOWS = {
    "tp": LAYOUT,
    "pp": (*LAYOUT, "parallel.pipeline."),
    "cp": (*LAYOUT, "parallel.context"),
    "non_finite": ("precision.check_overflow",),
}
"""Key -> the values that follow from it."""


def values(tree):
    """Every resolved value, for four processes."""
    resolved = resolve(load(tree), world_size=4, auto=CALLER, total_steps=50)
    return {
        value.name: (value.value, value.source)
        for value in values_of(dict(resolved), resolved.sources)
    }


@st.composite
def additions(draw):
    """The name of a file, and sections for it."""
    chosen = draw(st.sets(st.sampled_from(sorted(SECTIONS)), min_size=1))
    return draw(st.sampled_from(sorted(ACCEPTED))), {
        name: draw(st.sampled_from(SECTIONS[name])) for name in sorted(chosen)
    }


@settings(max_examples=30)
@given(additions())
def test_no_other_number_changes(addition):
    name, added = addition
    file = ACCEPTED[name]["file"]
    before = values(file)
    together = {
        **file,
        **{section: {**file.get(section, {}), **keys} for section, keys in added.items()},
    }
    try:
        after = values(together)
    except ConfigError as error:  # said, and not changed
        assert all(problem.rule and problem.remedy for problem in error.problems)
        return
    given_keys = [(section, key) for section, keys in added.items() for key in keys]
    may = (
        *(f"{section}.{key}" for section, key in given_keys),
        *(name for _, key in given_keys for name in FOLLOWS.get(key, ())),
    )
    changed = [
        key
        for key, (value, _) in before.items()
        if after[key][0] != value and not key.startswith(may)
    ]
    assert not changed, {key: (before[key], after[key]) for key in changed}


def test_an_empty_section_changes_nothing_at_all():
    rows = {name: row["file"] for name, row in ACCEPTED.items()}
    check_rows(rows, check_empty_sections)


def check_empty_sections(file):
    """Check that a file resolves to the same values with each empty section that it lacks."""
    before = {key: value for key, (value, _) in values(file).items()}
    for section in {"parallel", "run", "experts", "faults"} - set(file):
        after = values({**file, section: {}})
        assert before == {key: value for key, (value, _) in after.items()}, section
