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
    pairs = micro_batches((torch.arange(4), torch.zeros(4)), count=2, size=2)
    assert [x.tolist() for x, _ in pairs] == [[0, 1], [2, 3]]


WRONG_COUNT = "got {} micro-batches, but a step has gradient_accumulation_steps 2"


def test_iterables_give_ready_micro_batches():
    """They may have any length, but a step takes exactly its number of micro-batches."""
    loader = iter([torch.zeros(1), torch.zeros(5), torch.zeros(2)])
    assert [len(piece) for piece in micro_batches(loader, count=2, size=9)] == [1, 5]
    with pytest.raises(InputError, match=WRONG_COUNT.format(1)):
        micro_batches(loader, count=2, size=9)


def test_a_wrong_amount_is_refused_with_the_numbers():
    words = r"got 5 samples; this rank's share of a step is 6 \(train_micro_batch_size_per_gpu 2 x"
    with pytest.raises(InputError, match=words):
        micro_batches({"x": torch.zeros(5)}, count=3, size=2)
    with pytest.raises(InputError, match="does not have the step's 4 samples"):
        micro_batches({"x": torch.zeros(4), "y": torch.zeros(3)}, count=2, size=2)


def test_causal_loss_is_the_shifted_sum():
    """The sum is that of an explicit loop. The weight is known without a forward."""
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    labels = torch.randint(0, 7, (2, 5))
    labels[1, 3:] = -100
    total, weight = causal_lm_loss(SimpleNamespace(logits=logits), {"labels": labels})
    expected = 0.0
    for row in range(2):
        for position in range(4):
            if labels[row, position + 1] != -100:
                expected -= float(logits[row, position].log_softmax(-1)[labels[row, position + 1]])
    assert float(total) == pytest.approx(expected, rel=1e-12)
    assert int(weight) == int(causal_lm_loss.weight({"labels": labels})) == 4 + 2


def test_other_losses():
    """All of Plait's are Losses; a plain function is not."""
    mean = per_sample(lambda output, batch: output.sum())
    assert isinstance(mean, Loss) and mean(torch.ones(3), (torch.zeros(4, 2), None)) == (3, 4)
    assert isinstance(WeightedLoss(lambda o, b: (o, 1), lambda b: 1), Loss)
    assert not isinstance(lambda o, b: (o, 1), Loss)


def test_without_a_size_the_batch_decides():
    """A batch that accumulation does not divide is still refused."""
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
    """Batch that torch's default collation makes of a data set of (x, y)."""
    return [torch.arange(rows * 3.0).view(rows, 3), torch.arange(rows)]


@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_default_collation_is_one_batch(count, size):
    """A25: `[x, y]` is cut like `(x, y)`, also where a step has two micro-batches. The model and the loss see the same."""
    rows = 3 * count
    pieces = micro_batches(x_and_y(rows), count=count, size=size)
    numbers = [list(range(at, at + 3)) for at in range(0, rows, 3)]
    assert [piece[1].tolist() for piece in pieces] == numbers
    for piece in pieces:
        assert torch.equal(default_forward(nn.Identity(), piece), piece[0])
    nested = [{"ids": torch.arange(rows)}, torch.zeros(rows)]  # (mapping, y)
    pieces = micro_batches(nested, count=count, size=size)
    assert [piece[0]["ids"].tolist() for piece in pieces] == numbers


def test_a_short_collated_batch_is_no_list_of_micro_batches():
    """A25: this happens with the last batch of a loader."""
    with pytest.raises(InputError, match="got 5 samples; this rank's share of a step is 8"):
        micro_batches(x_and_y(5), count=2, size=4)


def test_lists_of_micro_batches_stay_lists():
    """They may be mappings with optional keys, tuples, collated pairs, tensors of a micro-batch's size, or ragged."""
    mappings = [{"ids": torch.zeros(4, 5)}, {"ids": torch.zeros(4, 7), "side": True}]
    tensors = [torch.zeros(4, 2), torch.ones(4, 2)]
    pairs = [(x, x) for x in tensors]
    ragged = [torch.zeros(4), torch.zeros(3)]
    for batches in (mappings, pairs, [x_and_y(4), x_and_y(4)], tensors, ragged):
        pieces = micro_batches(batches, count=2, size=4)
        assert len(pieces) == 2
        assert all(one is other for one, other in zip(pieces, batches, strict=True))
    assert len(micro_batches([x_and_y(4)], count=1, size=4)[0]) == 2
    with pytest.raises(InputError, match=WRONG_COUNT.format(3)):
        micro_batches([*pairs, pairs[0]], count=2, size=4)


def test_a_list_that_could_be_either_is_refused():
    """A25: two tensors of one shape without a batch size are ambiguous. The message says how to write either meaning."""
    ids = [torch.zeros(6, 5, dtype=torch.int64), torch.ones(6, 5, dtype=torch.int64)]
    words = "one batch of 2 fields or 2 micro-batches; pass a tuple for one batch, or iter"
    with pytest.raises(InputError, match=words):
        micro_batches(ids, count=2, size=None)
    assert [len(piece[0]) for piece in micro_batches(tuple(ids), count=2, size=None)] == [3, 3]
    assert [len(piece) for piece in micro_batches(iter(ids), count=2, size=None)] == [6, 6]
    assert [len(piece[0]) for piece in micro_batches(ids, count=2, size=3)] == [3, 3]
    assert [len(piece) for piece in micro_batches(ids, count=2, size=6)] == [6, 6]


def test_containers_keep_their_class():
    """A25: dataclasses, named tuples and Transformers' BatchEncoding are cut and moved. A loss may read `batch.labels`."""
    from transformers import BatchEncoding

    x, y = x_and_y(4)
    for batch in (Fields(x, y), Named(x, y)):
        pieces = micro_batches(batch, count=2, size=2)
        pieces = [to_device(piece, torch.device("cpu")) for piece in pieces]
        assert [type(piece) for piece in pieces] == [type(batch)] * 2
        assert [piece.y.tolist() for piece in pieces] == [[0, 1], [2, 3]]
        assert per_sample(lambda o, b: o).weight(pieces[0]) == 2
    encoding = BatchEncoding({"input_ids": y, "labels": y, "texts": ["a", "b", "c", "d"]})
    pieces = micro_batches(encoding, count=2, size=2)
    assert [piece.labels.tolist() for piece in pieces] == [[0, 1], [2, 3]]
    assert pieces[1]["texts"] == ["c", "d"]
    assert encoding.labels.tolist() == [0, 1, 2, 3]
    meta = to_device(pieces[0], torch.device("meta"))
    assert (meta.labels.device.type, pieces[0].labels.device.type) == ("meta", "cpu")
    assert type(meta) is BatchEncoding


def test_lists_inside_a_batch():
    """A25: lists with one entry per sample and lists of tensors are cut, and all tensors move."""
    batch = {"x": torch.zeros(4), "texts": list("abcd"), "levels": [torch.arange(4)] * 2, "names": ["p", "q"]}  # fmt: skip
    second = to_device(micro_batches(batch, count=2, size=2)[1], torch.device("meta"))
    assert second["texts"] == ["c", "d"] and second["names"] == ["p", "q"]
    assert [(len(level), level.device.type) for level in second["levels"]] == [(2, "meta")] * 2
    images = [torch.zeros(3, 8 + n) for n in range(4)]
    boxes = [{"box": torch.zeros(n, 4)} for n in range(4)]
    assert [len(piece[0]) for piece in micro_batches((images, boxes), count=2, size=2)] == [2, 2]


def test_what_is_no_batch_is_said():
    """A25: the message never is torch's or Python's. A loader that would restart at every step is refused."""
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2)
    with pytest.raises(InputError, match="got a DataLoader, which would restart at every step"):
        micro_batches(loader, count=2, size=2)
    pieces = micro_batches(iter(loader), count=2, size=2)
    assert [piece.tolist() for piece in pieces] == [[0, 1], [2, 3]]
    pieces = micro_batches((torch.zeros(n) for n in (1, 2)), count=2, size=2)
    assert [len(piece) for piece in pieces] == [1, 2]
    with pytest.raises(InputError, match="has none; convert lists of numbers to tensors"):
        micro_batches({"input_ids": [[1, 2], [3, 4]]}, count=1, size=2)
    with pytest.raises(InputError, match="not int"):
        micro_batches(3, count=1, size=2)


def test_weights_that_differ_are_found():
    """A16: the weights that the loss returned are compared with the step's divisor, to the digits that they have."""
    loss = WeightedLoss(lambda o, b: (o, 1), lambda b: 1)
    check, one = WeightCheck(), torch.tensor(1024.0, dtype=torch.float64)
    check(divided_by=one, returned=one, step=1)
    words = r"step 2: the loss returned weights that add up to 1023, and its weight function .* returned 1024"
    with pytest.raises(InputError, match=words):
        check(divided_by=one, returned=one - 1, step=2)
    check.note(torch.tensor(1.0, dtype=torch.bfloat16))
    check(divided_by=one, returned=one - 1, step=3)
    with pytest.raises(InputError, match="add up to nan"):
        check(divided_by=one, returned=one * float("nan"), step=4)
    # Both weights of a loss of Plait's are one number.
    assert check.applies_to(loss) and not check.applies_to(causal_lm_loss)


class Half(StepHook):
    def transform(self, batch):
        return {name: entry.chunk(2, dim=1)[1] for name, entry in batch.items()}


BATCH = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "labels": torch.tensor([[3, 4, IGNORED, 6]])}


class TestTransform:
    def test_labels_are_shifted_before_a_sequence_is_cut(self):
        """Position 1 predicts the label at 2, and position 2 that at 3, even across parts."""
        part = Hooks([StepHook(), Half()]).prepare(BATCH)
        assert {name: entry.tolist() for name, entry in part.items()} == {
            "input_ids": [[5, 6]],
            "labels": [[IGNORED, 6]],
            "shift_labels": [[6, IGNORED]],
            "position_ids": [[2, 3]],
        }
        assert Hooks([StepHook()]).prepare(BATCH) is BATCH

    def test_the_parts_of_a_loss_add_up(self):
        """Losses and weights add up, and the model receives positions and no labels."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(1, 4, 11, dtype=torch.float64, generator=generator)
        full = with_explicit_entries(BATCH)
        losses, weights = [], []
        for at in (slice(0, 1), slice(1, 4)):
            part = {name: entry[:, at] for name, entry in full.items()}
            loss, weight = causal_lm_loss(SimpleNamespace(logits=logits[:, at]), part)
            losses.append(loss)
            weights += [int(weight), int(causal_lm_loss.weight(part))]
        total, weight = causal_lm_loss(SimpleNamespace(logits=logits), BATCH)
        assert torch.allclose(sum(losses), total, rtol=1e-15)
        assert weights == [1] * 4
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
        batch = with_cache({"input_ids": 1}, "kept", argument="cache")
        assert batch == {"input_ids": 1, "cache": "kept", "use_cache": True}
        words = "the batch must be a mapping, not Tensor"
        with pytest.raises(InputError, match=words):
            with_cache(torch.zeros(1), "kept", argument="cache")
