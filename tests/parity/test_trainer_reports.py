"""`report_to`: the first process alone reports, and what a run in one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.parity import trainers
from tests.parity.trainers import zero
from tests.pool import Pool


def reported(
    rank: int, world: int, config: dict[str, Any], folder: str
) -> list[tuple[int, dict[str, float]]]:
    """(step, what was logged) that a tracker was given. Runs in a worker."""
    with trainers.launched(rank, world):
        from transformers import TrainerCallback
        from transformers.integrations import integration_utils

        from plait.hf import Trainer, TrainingArguments

        rows: list[tuple[int, dict[str, float]]] = []

        class Tracker(TrainerCallback):  # type: ignore[misc]
            def on_log(
                self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any
            ) -> None:
                if state.is_world_process_zero and "loss" in logs:
                    rows.append(
                        (
                            state.global_step,
                            {
                                key: float(logs[key])
                                for key in ("loss", "grad_norm", "learning_rate")
                            },
                        )
                    )

        with mock.patch.dict(integration_utils.INTEGRATION_TO_CALLBACK, {"tracker": Tracker}):
            arguments = trainers.arguments(
                TrainingArguments, folder, deepspeed=config, report_to=["tracker"]
            )
            Trainer(
                model=trainers.model(), args=arguments, train_dataset=trainers.samples()
            ).train()
        return rows


@pytest.mark.parametrize(
    ("dp", "config"), [(2, zero(3)), (1, {"parallel": {"pp": 2}})], ids=["zero3", "pp2"]
)
def test_the_first_process_reports_what_one_process_does(
    pool: Pool, tmp_path: Path, dp: int, config: dict[str, Any]
) -> None:
    """In a pipeline too, whose last stage has the loss."""
    wanted = trainers.native(dp)
    first, second = pool.run(2, reported, config, str(tmp_path))
    assert second == [] and [step for step, _ in first] == list(range(1, len(wanted["loss"]) + 1))
    for key in ("loss", "grad_norm", "learning_rate"):
        assert [row[key] for _, row in first] == pytest.approx(wanted[key], rel=1e-5)
