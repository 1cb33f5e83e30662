"""Cutting a batch and weighing it."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from plait.engine.engine import WeightCheck
from plait.errors import InputError
from plait.losses.loss import Loss, WeightedLoss, causal_lm_loss, per_sample
from plait.parallel.hooks import Hooks, StepHook
from plait.parallel.micro_batches import (
    IGNORED,
    default_forward,
    micro_batches,
    to_device,
    with_cache,
    with_explicit_entries,
)


def test_mappings_tuples_and_tensors_are_cut_in_order():
    """Entries without a batch dimension go to every micro-batch."""
    batch = {"x": torch.arange(6), "flag": True, "scalar": torch.tensor(3)}
    pieces = micro_batches(batch, count=3, size=2)
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]
    assert all(piece["flag"] is True and int(piece["scalar"]) == 3 for piece in pieces)
    assert [
        x.tolist() for x, _ in micro_batches((torch.arange(4), torch.zeros(4)), count=2, size=2)
    ] == [[0, 1], [2, 3]]


def test_iterables_give_ready_micro_batches():
    """Of any length; exactly as many as a step has."""
    loader = iter([torch.zeros(1), torch.zeros(5), torch.zeros(2)])
    assert [len(piece) for piece in micro_batches(loader, count=2, size=9)] == [1, 5]
    with pytest.raises(
        InputError, match="got 1 micro-batches, but a step has gradient_accumulation_steps 2"
    ):
        micro_batches(loader, count=2, size=9)


def test_a_wrong_amount_is_refused_with_the_numbers():
    with pytest.raises(
        InputError,
        match=r"got 5 samples; this rank's share of a step is 6 \(train_micro_batch_size_per_gpu 2 x",
    ):
        micro_batches({"x": torch.zeros(5)}, count=3, size=2)
    with pytest.raises(InputError, match="does not have the step's 4 samples"):
        micro_batches({"x": torch.zeros(4), "y": torch.zeros(3)}, count=2, size=2)


class Logits:
    def __init__(self, logits):
        self.logits = logits


def test_causal_loss_is_the_shifted_sum():
    """Against an explicit loop; the weight is known without a forward."""
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    labels = torch.randint(0, 7, (2, 5))
    labels[1, 3:] = -100
    total, weight = causal_lm_loss(Logits(logits), {"labels": labels})
    wanted = 0.0
    for row in range(2):
        for position in range(4):
            if labels[row, position + 1] != -100:
                wanted -= float(logits[row, position].log_softmax(-1)[labels[row, position + 1]])
    assert float(total) == pytest.approx(wanted, rel=1e-12)
    assert int(weight) == int(causal_lm_loss.weight({"labels": labels})) == 4 + 2


def test_other_losses():
    """All are Losses; a plain function is not."""
    mean = per_sample(lambda output, batch: output.sum())
    assert isinstance(mean, Loss) and mean(torch.ones(3), (torch.zeros(4, 2), None)) == (3, 4)
    assert isinstance(WeightedLoss(lambda o, b: (o, 1), lambda b: 1), Loss)
    assert not isinstance(lambda o, b: (o, 1), Loss)


def test_without_a_size_the_batch_decides():
    """A file that gives no batch size; what accumulation does not divide is still refused."""
    assert [len(piece) for piece in micro_batches(torch.zeros(6), count=2, size=None)] == [3, 3]
    with pytest.raises(InputError, match="got 7 samples"):
        micro_batches(torch.zeros(7), count=2, size=None)


@dataclass(frozen=True)
class Fields:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "fields"


class Named(NamedTuple):
    """A named tuple, as a collation may make it."""

    x: torch.Tensor
    y: torch.Tensor


def x_and_y(rows):
    """What torch's default collation makes of a data set of (x, y)."""
    return [torch.arange(rows * 3.0).view(rows, 3), torch.arange(rows)]


@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_default_collation_is_one_batch(count, size):
    """A25: `[x, y]` is cut like `(x, y)`, also where a step has two micro-batches; what the model and the loss see is the same."""
    rows = 3 * count
    pieces = micro_batches(x_and_y(rows), count=count, size=size)
    assert [piece[1].tolist() for piece in pieces] == [
        list(range(at, at + 3)) for at in range(0, rows, 3)
    ]
    assert [default_forward(torch.nn.Identity(), piece)[:, 0].tolist() for piece in pieces] == [
        p[0][:, 0].tolist() for p in pieces
    ]
    nested = [{"ids": torch.arange(rows)}, torch.zeros(rows)]  # (mapping, y)
    assert [
        piece[0]["ids"].tolist() for piece in micro_batches(nested, count=count, size=size)
    ] == [p[1].tolist() for p in pieces]


def test_a_short_collated_batch_is_no_list_of_micro_batches():
    """A25: the last batch of a loader."""
    with pytest.raises(InputError, match="got 5 samples; this rank's share of a step is 8"):
        micro_batches(x_and_y(5), count=2, size=4)


def test_lists_of_micro_batches_stay_lists():
    """Mappings with optional keys, tuples, collated pairs, tensors of the size of a micro-batch, ragged ones."""
    mappings = [{"ids": torch.zeros(4, 5)}, {"ids": torch.zeros(4, 7), "side": True}]
    tensors = [torch.zeros(4, 2), torch.ones(4, 2)]
    for given in (
        mappings,
        [(x, x) for x in tensors],
        [x_and_y(4), x_and_y(4)],
        tensors,
        [torch.zeros(4), torch.zeros(3)],
    ):
        found = micro_batches(given, count=2, size=4)
        assert len(found) == 2 and all(
            one is other for one, other in zip(found, given, strict=True)
        )
    assert len(micro_batches([x_and_y(4)], count=1, size=4)[0]) == 2
    with pytest.raises(
        InputError, match="got 3 micro-batches, but a step has gradient_accumulation_steps 2"
    ):
        micro_batches([(x, x) for x in (*tensors, tensors[0])], count=2, size=4)


def test_a_list_that_could_be_either_is_refused():
    """A25: two tensors of one form and no batch size; each of the two is said in another way."""
    ids = [torch.zeros(6, 5, dtype=torch.int64), torch.ones(6, 5, dtype=torch.int64)]
    with pytest.raises(
        InputError,
        match=r"one batch of 2 fields or 2 micro-batches; pass a tuple for one batch, or iter",
    ):
        micro_batches(ids, count=2, size=None)
    assert [len(piece[0]) for piece in micro_batches(tuple(ids), count=2, size=None)] == [3, 3]
    assert [len(piece) for piece in micro_batches(iter(ids), count=2, size=None)] == [6, 6]
    assert [len(piece[0]) for piece in micro_batches(ids, count=2, size=3)] == [3, 3]
    assert [len(piece) for piece in micro_batches(ids, count=2, size=6)] == [6, 6]


def test_containers_keep_their_class():
    """A25: dataclasses, named tuples and Transformers' BatchEncoding, cut and moved; a loss may read `batch.labels`."""
    from transformers import BatchEncoding

    x, y = x_and_y(4)
    for batch in (Fields(x, y), Named(x, y)):
        pieces = [
            to_device(piece, torch.device("cpu")) for piece in micro_batches(batch, count=2, size=2)
        ]
        assert [type(piece) for piece in pieces] == [type(batch)] * 2 and [
            piece.y.tolist() for piece in pieces
        ] == [[0, 1], [2, 3]]
        assert per_sample(lambda o, b: o).weight(pieces[0]) == 2
    encoding = BatchEncoding({"input_ids": y, "labels": y, "texts": ["a", "b", "c", "d"]})
    pieces = micro_batches(encoding, count=2, size=2)
    assert [piece.labels.tolist() for piece in pieces] == [[0, 1], [2, 3]] and pieces[1][
        "texts"
    ] == ["c", "d"]
    assert encoding.labels.tolist() == [0, 1, 2, 3]
    meta = to_device(pieces[0], torch.device("meta"))
    assert (
        meta.labels.device.type == "meta"
        and pieces[0].labels.device.type == "cpu"
        and type(meta) is BatchEncoding
    )


def test_lists_inside_a_batch():
    """A25: one entry a sample is cut, a list of tensors too, and all of them move."""
    batch = {
        "x": torch.zeros(4),
        "texts": list("abcd"),
        "levels": [torch.arange(4), torch.arange(4)],
        "names": ["p", "q"],
    }
    second = to_device(micro_batches(batch, count=2, size=2)[1], torch.device("meta"))
    assert second["texts"] == ["c", "d"] and second["names"] == ["p", "q"]
    assert [(len(level), level.device.type) for level in second["levels"]] == [(2, "meta")] * 2
    images = (
        [torch.zeros(3, 8 + n) for n in range(4)],
        [{"box": torch.zeros(n, 4)} for n in range(4)],
    )
    assert [len(piece[0]) for piece in micro_batches(images, count=2, size=2)] == [2, 2]


def test_what_is_no_batch_is_said():
    """A25: never torch's or Python's own words; a loader that would begin anew at every step is found."""
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2)
    with pytest.raises(InputError, match="got a DataLoader, which would restart at every step"):
        micro_batches(loader, count=2, size=2)
    assert [piece.tolist() for piece in micro_batches(iter(loader), count=2, size=2)] == [
        [0, 1],
        [2, 3],
    ]
    assert [
        len(piece) for piece in micro_batches((torch.zeros(n) for n in (1, 2)), count=2, size=2)
    ] == [1, 2]
    with pytest.raises(InputError, match="has none; convert lists of numbers to tensors"):
        micro_batches({"input_ids": [[1, 2], [3, 4]]}, count=1, size=2)
    with pytest.raises(InputError, match="not int"):
        micro_batches(3, count=1, size=2)


def test_weights_that_differ_are_found():
    """A16: what the loss returned against what the step was divided by, to the digits that they have."""
    loss = WeightedLoss(lambda o, b: (o, 1), lambda b: 1)
    check, one = WeightCheck(), torch.tensor(1024.0, dtype=torch.float64)
    check(divided_by=one, returned=one, step=1)
    with pytest.raises(
        InputError,
        match=r"step 2: the loss returned weights that add up to 1023, and its weight function .* returned 1024",
    ):
        check(divided_by=one, returned=one - 1, step=2)
    check.note(torch.tensor(1.0, dtype=torch.bfloat16))
    check(divided_by=one, returned=one - 1, step=3)
    with pytest.raises(InputError, match="add up to nan"):
        check(divided_by=one, returned=one * float("nan"), step=4)
    assert check.applies_to(loss) and not check.applies_to(causal_lm_loss), (
        "the two of a loss of Plait's are one number"
    )


class Half(StepHook):
    def transform(self, batch):
        return {name: entry.chunk(2, dim=1)[1] for name, entry in batch.items()}


BATCH = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "labels": torch.tensor([[3, 4, IGNORED, 6]])}


class TestTransform:
    def test_labels_are_shifted_before_a_sequence_is_cut(self):
        """Position 1 predicts the label at 2, and position 2 that at 3, whichever part they are in."""
        part = Hooks([StepHook(), Half()]).prepare(BATCH)
        assert {name: entry.tolist() for name, entry in part.items()} == {
            "input_ids": [[5, 6]],
            "labels": [[IGNORED, 6]],
            "shift_labels": [[6, IGNORED]],
            "position_ids": [[2, 3]],
        }
        assert Hooks([StepHook()]).prepare(BATCH) is BATCH

    def test_the_parts_of_a_loss_add_up(self):
        """Sums, weights, and the model is given positions and no labels."""
        logits = torch.randn(
            1, 4, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        full = with_explicit_entries(BATCH)
        parts = [
            {name: entry[:, at] for name, entry in full.items()}
            for at in (slice(0, 1), slice(1, 4))
        ]
        found = [
            causal_lm_loss(SimpleNamespace(logits=logits[:, at]), part)
            for at, part in zip((slice(0, 1), slice(1, 4)), parts, strict=True)
        ]
        total, weight = causal_lm_loss(SimpleNamespace(logits=logits), BATCH)
        assert torch.allclose(sum(loss for loss, _ in found), total, rtol=1e-15)
        assert (
            [int(causal_lm_loss.weight(part)) for part in parts]
            == [int(count) for _, count in found]
            == [1, 1]
        )
        assert int(weight) == int(causal_lm_loss.weight(full)) == 2

        class Names(nn.Module):
            def forward(self, **entries):
                return sorted(entries)

        assert default_forward(Names(), full) == ["input_ids", "position_ids"]

    def test_what_is_given_stays(self):
        given = {
            "input_ids": torch.zeros(1, 2),
            "position_ids": torch.tensor([[7, 8]]),
            "shift_labels": torch.tensor([[1, 2]]),
        }
        assert with_explicit_entries(given) == given
        assert with_explicit_entries((1, 2)) == (1, 2)

    def test_a_cache_goes_by_name(self):
        assert with_cache({"input_ids": 1}, "kept", argument="cache") == {
            "input_ids": 1,
            "cache": "kept",
            "use_cache": True,
        }
        with pytest.raises(InputError, match="the batch must be a mapping, not Tensor"):
            with_cache(torch.zeros(1), "kept", argument="cache")
