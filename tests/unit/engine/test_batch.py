"""Cutting a batch and weighing it."""

from __future__ import annotations

import pytest
import torch

from plait.engine.batch import micro_batches
from plait.engine.loss import Loss, Weighted, causal_lm_loss, per_sample
from plait.errors import InputError


def test_mappings_tuples_and_tensors_are_cut_in_order() -> None:
    """Entries without a batch dimension go to every micro-batch."""
    batch = {"x": torch.arange(6), "flag": True, "scalar": torch.tensor(3)}
    pieces = micro_batches(batch, count=3, size=2)
    assert [piece["x"].tolist() for piece in pieces] == [[0, 1], [2, 3], [4, 5]]
    assert all(piece["flag"] is True and int(piece["scalar"]) == 3 for piece in pieces)
    assert [x.tolist() for x, _ in micro_batches((torch.arange(4), torch.zeros(4)), count=2, size=2)] == [[0, 1], [2, 3]]


def test_iterables_give_ready_micro_batches() -> None:
    """Of any length; exactly as many as a step has."""
    loader = iter([torch.zeros(1), torch.zeros(5), torch.zeros(2)])
    assert [len(piece) for piece in micro_batches(loader, count=2, size=9)] == [1, 5]
    with pytest.raises(InputError, match="got 1 micro-batches and a step has gradient_accumulation_steps 2"):
        micro_batches(loader, count=2, size=9)


def test_a_wrong_amount_is_refused_with_the_numbers() -> None:
    """Never padded, never cut short."""
    with pytest.raises(InputError, match=r"got 5 samples; this rank's share of a step is 6 \(train_micro_batch_size_per_gpu 2 x"):
        micro_batches({"x": torch.zeros(5)}, count=3, size=2)
    with pytest.raises(InputError, match="does not have the step's 4 samples"):
        micro_batches({"x": torch.zeros(4), "y": torch.zeros(3)}, count=2, size=2)


class Logits:
    """A Transformers-like output."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def test_causal_loss_is_the_shifted_sum() -> None:
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


def test_other_losses() -> None:
    """All are Losses; a plain function is not."""
    mean = per_sample(lambda output, batch: output.sum())
    assert isinstance(mean, Loss) and mean(torch.ones(3), (torch.zeros(4, 2), None)) == (3, 4)
    assert isinstance(Weighted(lambda o, b: (o, 1), lambda b: 1), Loss)
    assert not isinstance(lambda o, b: (o, 1), Loss)


def test_without_a_size_the_batch_decides() -> None:
    """A file that gives no batch size; what accumulation does not divide is still refused."""
    assert [len(piece) for piece in micro_batches(torch.zeros(6), count=2, size=None)] == [3, 3]
    with pytest.raises(InputError, match="got 7 samples"):
        micro_batches(torch.zeros(7), count=2, size=None)
