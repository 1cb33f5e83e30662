"""Batches are cut into micro-batches, moved to a device, passed to the model, and weighed."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

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

WRONG_COUNT = "got {} micro-batches, but a step has gradient_accumulation_steps 2"


def collated(rows):
    """Return the list [x, y] that torch's default collation makes of samples (x, y)."""
    return [torch.arange(rows * 3.0).view(rows, 3), torch.arange(rows)]


def lengths(batches):
    return [len(batch) for batch in batches]


def first_lengths(batches):
    return [len(batch[0]) for batch in batches]


def test_mappings_and_tuples_are_cut_in_order():
    """Entries without a batch dimension go to every micro-batch."""
    batch = {"x": torch.arange(6), "flag": True, "scalar": torch.tensor(3)}
    for index, micro_batch in enumerate(micro_batches(batch, count=3, size=2)):
        assert micro_batch["x"].tolist() == [2 * index, 2 * index + 1]
        assert micro_batch["flag"] is True
        assert micro_batch["scalar"] == 3
    pairs = micro_batches((torch.arange(4), torch.zeros(4)), count=2, size=2)
    assert [x.tolist() for x, _ in pairs] == [[0, 1], [2, 3]]


def test_iterators_give_ready_micro_batches():
    """They may have any length, but a step takes exactly its number of micro-batches."""
    loader = iter([torch.zeros(1), torch.zeros(5), torch.zeros(2)])
    assert lengths(micro_batches(loader, count=2, size=9)) == [1, 5]
    with pytest.raises(InputError, match=WRONG_COUNT.format(1)):
        micro_batches(loader, count=2, size=9)
    generator = (torch.zeros(size) for size in (1, 2))
    assert lengths(micro_batches(generator, count=2, size=2)) == [1, 2]


def test_without_a_size_the_batch_decides():
    """A batch that accumulation does not divide is still refused."""
    assert lengths(micro_batches(torch.zeros(6), count=2, size=None)) == [3, 3]
    with pytest.raises(InputError, match="got 7 samples"):
        micro_batches(torch.zeros(7), count=2, size=None)


@pytest.mark.parametrize("size", [3, None])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_default_collation_is_one_batch(count, size):
    """`[x, y]` is cut like `(x, y)`, also if a step has two micro-batches."""
    rows = 3 * count
    labels = torch.arange(rows).view(count, 3).tolist()
    batches = micro_batches(collated(rows), count=count, size=size)
    assert [y.tolist() for _, y in batches] == labels
    for batch in batches:
        assert torch.equal(default_forward(nn.Identity(), batch), batch[0])
    with_mapping = [{"ids": torch.arange(rows)}, torch.zeros(rows)]
    batches = micro_batches(with_mapping, count=count, size=size)
    assert [x["ids"].tolist() for x, _ in batches] == labels


def test_lists_of_micro_batches_stay_lists():
    mappings = [{"ids": torch.zeros(4, 5)}, {"ids": torch.zeros(4, 7), "optional": True}]
    tensors = [torch.zeros(4, 2), torch.ones(4, 2)]
    pairs = [(x, x) for x in tensors]
    ragged = [torch.zeros(4), torch.zeros(3)]
    for expected in (mappings, pairs, [collated(4), collated(4)], tensors, ragged):
        first, second = micro_batches(expected, count=2, size=4)
        assert first is expected[0]
        assert second is expected[1]
    assert first_lengths(micro_batches([collated(4)], count=1, size=4)) == [4]
    with pytest.raises(InputError, match=WRONG_COUNT.format(3)):
        micro_batches([*pairs, pairs[0]], count=2, size=4)


def test_an_ambiguous_list_is_refused():
    """Two tensors of one shape may be one batch or two. The message says how to write either."""
    ids = [torch.zeros(6, 5, dtype=torch.int64), torch.ones(6, 5, dtype=torch.int64)]
    message = "one batch of 2 fields or 2 micro-batches; pass a tuple for one batch, or iter"
    with pytest.raises(InputError, match=message):
        micro_batches(ids, count=2, size=None)
    assert first_lengths(micro_batches(tuple(ids), count=2, size=None)) == [3, 3]
    assert lengths(micro_batches(iter(ids), count=2, size=None)) == [6, 6]
    # A size decides, too.
    assert first_lengths(micro_batches(ids, count=2, size=3)) == [3, 3]
    assert lengths(micro_batches(ids, count=2, size=6)) == [6, 6]


def test_a_restarting_loader_is_refused():
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2)
    with pytest.raises(InputError, match="got a DataLoader, which would restart at every step"):
        micro_batches(loader, count=2, size=2)
    # The remedy works.
    batches = micro_batches(iter(loader), count=2, size=2)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("batch", "count", "size", "message"),
    [
        ({"x": torch.zeros(5)}, 3, 2, r"got 5 samples; .* 6 \(train_micro_batch_size_per_gpu 2 x"),
        ({"x": torch.zeros(4), "y": torch.zeros(3)}, 2, 2, "does not have the step's 4 samples"),
        # The last batch of a loader may be short.
        (collated(5), 2, 4, "got 5 samples; this rank's share of a step is 8"),
        ({"ids": [[1, 2], [3, 4]]}, 1, 2, "has none; convert lists of numbers to tensors"),
        (3, 1, 2, "not int"),
    ],
)
def test_wrong_batches_are_refused(batch, count, size, message):
    with pytest.raises(InputError, match=message):
        micro_batches(batch, count=count, size=size)


@dataclass(frozen=True)
class Fields:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "fields"


class Named(NamedTuple):
    """A named tuple, as a collation function may return it."""

    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("kind", [Fields, Named])
def test_containers_keep_their_class(kind):
    for index, batch in enumerate(micro_batches(kind(*collated(4)), count=2, size=2)):
        moved = to_device(batch, torch.device("cpu"))
        assert type(moved) is kind
        assert moved.y.tolist() == [2 * index, 2 * index + 1]
        assert per_sample(lambda output, batch: output).weight(moved) == 2


def test_batch_encodings_are_cut_and_moved():
    """A loss may read `batch.labels`."""
    labels = torch.arange(4)
    encoding = BatchEncoding({"input_ids": labels, "labels": labels, "texts": list("abcd")})
    first, second = micro_batches(encoding, count=2, size=2)
    assert first.labels.tolist() == [0, 1]
    assert second.labels.tolist() == [2, 3]
    assert second["texts"] == ["c", "d"]
    assert encoding.labels.tolist() == [0, 1, 2, 3]

    moved = to_device(first, torch.device("meta"))
    assert type(moved) is BatchEncoding
    assert moved.labels.device.type == "meta"
    assert first.labels.device.type == "cpu"


def test_lists_inside_a_batch():
    """Lists with one entry per sample and lists of tensors are cut, and all tensors move."""
    batch = {
        "x": torch.zeros(4),
        "texts": list("abcd"),
        "levels": [torch.arange(4)] * 2,
        "names": ["p", "q"],
    }
    second = to_device(micro_batches(batch, count=2, size=2)[1], torch.device("meta"))
    assert second["texts"] == ["c", "d"]
    assert second["names"] == ["p", "q"]
    for level in second["levels"]:
        assert level.shape == (2,)
        assert level.device.type == "meta"
    images = [torch.zeros(3, 8 + n) for n in range(4)]
    boxes = [{"box": torch.zeros(n, 4)} for n in range(4)]
    assert first_lengths(micro_batches((images, boxes), count=2, size=2)) == [2, 2]


def test_causal_loss_is_the_shifted_sum():
    """The weight is known without a forward."""
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    labels = torch.randint(0, 7, (2, 5))
    labels[1, 3:] = IGNORED
    total, weight = causal_lm_loss(SimpleNamespace(logits=logits), {"labels": labels})

    expected = 0.0
    for row, position in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)):
        log_probabilities = logits[row, position].log_softmax(-1)
        expected -= log_probabilities[labels[row, position + 1]].item()
    assert total.item() == pytest.approx(expected, rel=1e-12)
    assert weight == causal_lm_loss.weight({"labels": labels}) == 6


def test_kinds_of_losses():
    """All losses of Plait are Losses. A plain function is not."""
    mean = per_sample(lambda output, batch: output.sum())
    assert isinstance(mean, Loss)
    assert mean(torch.ones(3), (torch.zeros(4, 2), None)) == (3, 4)
    assert isinstance(WeightedLoss(lambda o, b: (o, 1), lambda b: 1), Loss)
    assert not isinstance(lambda o, b: (o, 1), Loss)


def test_weights_that_differ_are_refused():
    """The weights that the loss returned are compared with the divisor of the step."""
    check = WeightCheck()
    divisor = torch.tensor(1024.0, dtype=torch.float64)
    check(divided_by=divisor, returned=divisor, step=1)
    message = r"step 2: the loss returned weights that add up to 1023, .* returned 1024"
    with pytest.raises(InputError, match=message):
        check(divided_by=divisor, returned=divisor - 1, step=2)
    # bfloat16 cannot represent the difference.
    check.note(torch.tensor(1.0, dtype=torch.bfloat16))
    check(divided_by=divisor, returned=divisor - 1, step=3)
    with pytest.raises(InputError, match="add up to nan"):
        check(divided_by=divisor, returned=divisor * float("nan"), step=4)
    # A loss of Plait computes both weights in one place.
    assert check.applies_to(WeightedLoss(lambda o, b: (o, 1), lambda b: 1))
    assert not check.applies_to(causal_lm_loss)


class SecondHalf(StepHook):
    """Keeps the second half of each sequence, as context parallelism does on one of two ranks."""

    def transform(self, batch):
        return {name: entry.chunk(2, dim=1)[1] for name, entry in batch.items()}


BATCH = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "labels": torch.tensor([[3, 4, IGNORED, 6]])}


def test_labels_are_shifted_before_a_sequence_is_cut():
    """Position 1 predicts the label at 2, which another rank has."""
    batch = Hooks([StepHook(), SecondHalf()]).prepare(BATCH)
    assert {name: entry.tolist() for name, entry in batch.items()} == {
        "input_ids": [[5, 6]],
        "labels": [[IGNORED, 6]],
        "shift_labels": [[6, IGNORED]],
        "position_ids": [[2, 3]],
    }
    assert Hooks([StepHook()]).prepare(BATCH) is BATCH


def test_losses_and_weights_of_parts_add_up():
    logits = torch.randn(1, 4, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, expected_weight = causal_lm_loss(SimpleNamespace(logits=logits), BATCH)
    explicit = with_explicit_entries(BATCH)
    total = 0
    for part in (slice(0, 1), slice(1, 4)):
        batch = {name: entry[:, part] for name, entry in explicit.items()}
        loss, weight = causal_lm_loss(SimpleNamespace(logits=logits[:, part]), batch)
        assert weight == causal_lm_loss.weight(batch) == 1
        total += loss
    torch.testing.assert_close(total, expected, rtol=1e-15, atol=0)
    assert expected_weight == causal_lm_loss.weight(explicit) == 2


def test_the_model_gets_positions_and_no_labels():
    class Names(nn.Module):
        def forward(self, **entries):
            return sorted(entries)

    assert default_forward(Names(), with_explicit_entries(BATCH)) == ["input_ids", "position_ids"]


def test_explicit_entries_of_the_user_stay():
    batch = {
        "input_ids": torch.zeros(1, 2),
        "position_ids": torch.tensor([[7, 8]]),
        "shift_labels": torch.tensor([[1, 2]]),
    }
    assert with_explicit_entries(batch) == batch
    assert with_explicit_entries((1, 2)) == (1, 2)


def test_a_cache_is_passed_by_name():
    batch = with_cache({"input_ids": 1}, "cache object", argument="cache")
    assert batch == {"input_ids": 1, "cache": "cache object", "use_cache": True}
    with pytest.raises(InputError, match="the batch must be a mapping, not Tensor"):
        with_cache(torch.zeros(1), "cache object", argument="cache")
