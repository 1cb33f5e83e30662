"""Values survive JSON with their types."""

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
    None,
    True,
    -3,
    0.1 + 0.2,
    math.inf,
    -math.inf,
    "text",
    [1, [2, "a"]],
    (1, (2.5, None)),
    {"a": {"b": 1}},
    {4: 1, (1, 2): "x"},
    # The key with which the encoding marks types.
    {"$": "text"},
    Counter({4: 1, 9: 2}),
    OrderedDict([("b", 1), ("a", 2)]),
    {1, 2, 3},
    frozenset({"a"}),
    deque([1, 2]),
    b"\x00\xff",
    1 + 2j,
    np.float32(0.1),
    np.int64(7),
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size([2, 3]),
]


def through_json(value, *context):
    return exact.decode(json.loads(json.dumps(exact.encode(value))), *context)


def check_survives(value):
    decoded = through_json(value)
    assert decoded == value and type(decoded) is type(value)
    if isinstance(value, dict | list | tuple):
        assert repr(decoded) == repr(value)


def test_values_survive_exactly():
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
        decoded = through_json(tensor)
        assert decoded.dtype == dtype and decoded.shape == tensor.shape
        assert torch.equal(decoded, tensor)


def test_not_a_number_survives():
    assert math.isnan(exact.decode(exact.encode(math.nan)))


def test_functions_are_those_of_the_reader():
    """Code is no state, so functions are taken from the reader's value."""

    def saved_function(step):
        return 2.0

    def function(step):
        return 1.0

    partial = functools.partial(saved_function, 1)
    saved = {"fns": [saved_function, None], "part": partial, "kind": (dict,)}
    current = {"fns": [function, None], "part": function, "kind": (dict,)}
    assert through_json(saved, current) == current
    message = r"state.fns\[0\] was the function .*saved_function.*, and in this run it is None"
    with pytest.raises(CheckpointError, match=message):
        exact.decode(exact.encode(saved), {"fns": [None]}, "state")


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [object(), torch.nn.Linear(1, 1), Colour.RED, torch.empty(2000, 2000)],
    ids=lambda v: type(v).__name__,
)
def test_other_values_are_refused_by_name(value):
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
def test_other_encodings_are_refused(value):
    with pytest.raises(CheckpointError, match="does not have a form that Plait writes"):
        exact.decode(value)
