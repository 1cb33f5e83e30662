"""Values that come back from JSON as the types that they were."""

import functools
import json
import math
from collections import Counter, OrderedDict, deque
from enum import Enum

import numpy as np
import pytest
import torch

from plait import exact
from plait.errors import CheckpointError
from tests.table import check_rows

VALUES = [
    None, True, -3, 0.1 + 0.2, math.inf, -math.inf, "text", [1, [2, "a"]], (1, (2.5, None)), {"a": {"b": 1}}, {4: 1, (1, 2): "x"},
    {"$": "a key that marks"}, Counter({4: 1, 9: 2}), OrderedDict([("b", 1), ("a", 2)]), {1, 2, 3}, frozenset({"a"}), deque([1, 2]),
    b"\x00\xff", 1 + 2j, np.float32(0.1), np.int64(7), torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]),
]  # fmt: skip


def check_survives(value):
    found = exact.decode(json.loads(json.dumps(exact.encode(value))))
    assert found == value and type(found) is type(value)
    if isinstance(value, dict | list | tuple):
        assert repr(found) == repr(value)


def test_values_survive_exactly():
    """A9: through JSON and back, value and type."""
    check_rows({repr(value): value for value in VALUES}, check_survives)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]
)
def test_tensors_survive_exactly(dtype):
    for tensor in (
        torch.tensor(3.7).to(dtype),
        torch.randn(2, 3).to(dtype),
        torch.empty(0, 2, dtype=dtype),
        torch.randn(3, 2).t().to(dtype),
    ):
        found = exact.decode(json.loads(json.dumps(exact.encode(tensor))))
        assert found.dtype == dtype and found.shape == tensor.shape and torch.equal(found, tensor)


def test_not_a_number_survives():
    assert math.isnan(exact.decode(exact.encode(math.nan)))


def test_functions_are_the_readers_own():
    """Code is not state: the reader's function at the same place is taken, wherever it stands."""
    mine, theirs = (lambda step: 1.0), (lambda step: 2.0)
    saved = {"fns": [theirs, None], "part": functools.partial(theirs, 1), "kind": (dict,)}
    own = {"fns": [mine, None], "part": mine, "kind": (dict,)}
    found = exact.decode(json.loads(json.dumps(exact.encode(saved))), own)
    assert found == {"fns": [mine, None], "part": mine, "kind": (dict,)}
    words = r"state.fns\[0\] was the function .*lambda.*, and in this run it is None"
    with pytest.raises(CheckpointError, match=words):
        exact.decode(exact.encode(saved), {"fns": [None]}, "state")


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [object(), torch.nn.Linear(1, 1), Colour.RED, torch.empty(2000, 2000)],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_kept_is_named(value):
    with pytest.raises(CheckpointError, match=r"state.inner\[0\] is a"):
        exact.encode({"inner": [value]}, "state")


@pytest.mark.parametrize(
    "value",
    [
        {"$": "nonsense"},
        {"$": "tensor", "dtype": "save", "shape": [], "bytes": ""},
        {"$": "dict", "items": 3},
    ],
)
def test_foreign_forms_are_refused(value):
    with pytest.raises(CheckpointError, match="does not have a form that Plait writes"):
        exact.decode(value)
