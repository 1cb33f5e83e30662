"""One operator without values: what was found once is not asked again, and is what torch says."""

import torch

from plait._torch.operators import tree_leaves
from plait.model import without_values
from plait.model.without_values import Shapes

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS = [
    (aten.mul.Tensor, (meta(2, 3), meta(3)), {}),
    (aten.mul.Tensor, (meta(2, 3), meta(3, dtype=torch.float64)), {}),
    (aten.mul.Tensor, (meta(2, 3, dtype=torch.int64), 1), {}),
    (aten.mul.Tensor, (meta(2, 3, dtype=torch.int64), 1.0), {}),
    (aten.mul.Tensor, (meta(2, 3, dtype=torch.int64), True), {}),
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


def facts(result):
    leaves = tree_leaves(result)
    return [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]


def test_kept_shapes_are_torchs(monkeypatch):
    asked = []
    fresh = without_values._run_on_meta
    monkeypatch.setattr(
        without_values, "_run_on_meta", lambda func, *rest: asked.append(func) or fresh(func, *rest)
    )
    shapes = Shapes()
    for _ in range(2):
        for func, args, kwargs in CALLS:
            assert facts(shapes.of(func, args, kwargs)) == facts(fresh(func, args, kwargs)), func
    assert len(asked) == len(CALLS) + 1, (
        "all were asked once; views, which share memory with what they are of, every time"
    )


def test_results_are_tensors_of_their_own():
    shapes, given = Shapes(), (meta(2, 3), meta(3))
    first, second = (shapes.of(aten.mul.Tensor, given, {}) for _ in range(2))
    assert first is not second
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_what_is_written_to_is_returned_itself():
    target = torch.zeros(3)
    for _ in range(2):
        assert Shapes().of(aten.add_.Tensor, (target, meta(3)), {}) is target
