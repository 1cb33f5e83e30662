"""Warnings point at the line of the user's script."""

import warnings

import torch

import plait


def test_warnings_of_initialize_point_at_its_caller():
    model = torch.nn.Linear(2, 2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD"},
        "wall_clock_breakdown": True,
    }
    loss = plait.WeightedLoss(lambda output, batch: (output.sum(), 1), lambda batch: 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plait.initialize(model, config, loss_fn=loss).close()
    files = [w.filename for w in caught if "wall_clock_breakdown" in str(w.message)]
    assert files and set(files) == {__file__}
