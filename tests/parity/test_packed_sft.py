"""TRL's packed SFT: several texts in a row, with positions of their own, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity import trainers, trl_runs, words
from tests.parity.trainers import zero
from tests.pool import Pool

pytest.importorskip("trl")
pytestmark = pytest.mark.proof  # importing TRL takes ten seconds


def made(wrap: Callable[[type], type], folder: str, *, lora: bool, **settings: Any) -> Any:
    """With weights that stay as they are, and several texts in a row of 16 tokens."""
    from trl import SFTConfig, SFTTrainer

    return wrap(SFTTrainer)(
        model=trainers.model(),
        args=trainers.arguments(
            SFTConfig,
            folder,
            bf16=False,
            dataset_num_proc=None,
            optim="sgd",
            packing=True,
            max_length=16,
            **settings,
        ),
        train_dataset=words.texts(),
        eval_dataset=words.texts(),
        processing_class=words.tokenizer(),
    )


@pytest.mark.parametrize(
    ("dp", "config"), [(2, zero(3)), (1, {"parallel": {"tp": 2}}), (2, zero(0))]
)
def test_packed_rows_are_those_of_one_process(
    pool: Pool, tmp_path: Path, dp: int, config: dict[str, Any]
) -> None:
    wanted = trl_runs.native(made, (), dp, lora=False)
    found = pool.run(2, trl_runs.on_plait, made, (), config, str(tmp_path), False)[0]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5)
