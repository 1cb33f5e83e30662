"""Contradictions in the sections `model`, `data` and `run` are refused with a remedy."""

import pytest
import yaml

from plait.config.schema.sections import DataSection, ModelSection, RunSection
from tests.unit.config.cases import check_refusals

CONTRADICTIONS = {
    ModelSection: """
        {} -> set exactly one
        {config: {model_type: llama}, path: x} -> set exactly one
        {config: {hidden_size: 8}} -> model_type
        {path: x, dtype: int8} -> float32
    """,
    DataSection: """
        {paths: [a.txt]} -> `paths` is read by a `source`
        {source: files} -> set `paths`
        {source: jsonl} -> set `paths`
        {source: datasets, paths: [a, b]} -> exactly one data set and `paths` has 2
        {source: files, paths: [a], split: test} -> belong to source "datasets"
        {sequence_length: 1} -> greater than or equal to 2
        {validation_fraction: 1.0} -> less than 1
        {vocab_size: 256} -> greater than or equal to 257
    """,
    RunSection: """
        {processes: 0} -> at least one process
        {steps: 0} -> greater than or equal to 1
        {keep: 0} -> greater than or equal to 1
    """,
}


@pytest.mark.parametrize("section", CONTRADICTIONS)
def test_contradictions_are_refused(section):
    check_refusals(CONTRADICTIONS[section], lambda text: section(**yaml.safe_load(text)))
