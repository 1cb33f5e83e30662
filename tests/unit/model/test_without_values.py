"""Operators on meta tensors: shapes are those of torch, and are computed once per kind of call."""

import torch

from plait._torch.operators import tree_leaves
from plait.model import without_values
from plait.model.without_values import Shapes

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


INTEGERS = meta(2, 3, dtype=torch.int64)
CALLS = [
    (aten.mul.Tensor, (meta(2, 3), meta(3)), {}),
    (aten.mul.Tensor, (meta(2, 3), meta(3, dtype=torch.float64)), {}),
    (aten.mul.Tensor, (INTEGERS, 1), {}),
    (aten.mul.Tensor, (INTEGERS, 1.0), {}),
    (aten.mul.Tensor, (INTEGERS, True), {}),
    (aten.add.Tensor, (meta(3, 2).t(), meta(2, 3).t().t()), {}),
    (aten.add.Tensor, (meta(3, 2).t(), meta(3, 2).t()), {}),
    (aten.mean.dim, (meta(2, 3), [-1]), {"keepdim": True}),
    (aten.mean.dim, (meta(2, 3), [-1]), {"keepdim": False}),
    (aten.max.dim, (meta(2, 3), 1), {}),
    (aten.cat.default, ([meta(2, 3), meta(2, 1)], -1), {}),
    (aten.arange.start_step, (0, 6, 2), {"dtype": torch.int32, "device": torch.device("cpu")}),
    (aten.bmm.default, (meta(2, 3, 4), torch.empty(2, 4, 5)), {}),
    (aten.view.default, (meta(2, 3), [6]), {}),
]


def layouts(result):
    return [(leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in tree_leaves(result)]


def test_cached_shapes_are_those_of_torch(monkeypatch):
    calls = []
    run_on_meta = without_values._run_on_meta

    # The time that the cache saves shows nowhere else.
    def recorded(func, *arguments):
        calls.append(func)
        return run_on_meta(func, *arguments)

    monkeypatch.setattr(without_values, "_run_on_meta", recorded)
    shapes = Shapes()
    for _ in range(2):
        for func, args, kwargs in CALLS:
            expected = layouts(run_on_meta(func, args, kwargs))
            assert layouts(shapes.of(func, args, kwargs)) == expected, func
    # A view shares the memory of its base, so it is computed every time.
    assert len(calls) == len(CALLS) + 1


def test_results_do_not_share_memory():
    shapes = Shapes()
    arguments = (meta(2, 3), meta(3))
    first = shapes.of(aten.mul.Tensor, arguments, {})
    second = shapes.of(aten.mul.Tensor, arguments, {})
    assert first is not second
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_an_operator_in_place_returns_its_argument():
    target = torch.zeros(3)
    for _ in range(2):
        assert Shapes().of(aten.add_.Tensor, (target, meta(3)), {}) is target
