"""A warning points at the user's line (E10)."""

import warnings

import torch

import plait


def test_warnings_of_initialize_point_at_the_line_that_called_it():
    model = torch.nn.Linear(2, 2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD"},
        "wall_clock_breakdown": True,
    }
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plait.initialize(
            model,
            config,
            loss_fn=plait.WeightedLoss(lambda output, batch: (output.sum(), 1), lambda batch: 1),
        ).close()
    mine = [one for one in found if "wall_clock_breakdown" in str(one.message)]
    assert mine and all(one.filename == __file__ for one in mine)
