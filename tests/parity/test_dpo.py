"""TRL's DPOTrainer on Plait's layouts is the same in one process: policy, reference, metrics, adapters."""

from __future__ import annotations

import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import adapted, trainers, words
from tests.parity.trainers import close, zero
from tests.pool import Pool

pytest.importorskip("trl")
pytestmark = pytest.mark.proof  # importing TRL takes ten seconds
METRICS = ("rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/rejected", "num_tokens")


def run(kind: Any, folder: str, *, lora: bool, **settings: Any) -> dict[str, Any]:
    """Train with plain SGD, whose weights follow the gradients themselves, evaluate, save."""
    from trl import DPOConfig

    reference = None
    if not lora:
        reference = trainers.model()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(0.9)
    trainer = kind(
        model=adapted.model() if lora else trainers.model(),
        ref_model=reference,
        args=trainers.arguments(
            DPOConfig, folder, bf16=False, dataset_num_proc=None, optim="sgd", include_num_input_tokens_seen="no", beta=0.5, **settings
        ),
        train_dataset=words.preferences(),
        eval_dataset=words.preferences(),
        processing_class=words.tokenizer(),
    )
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model(f"{folder}/model")
    found = trainers.result(trainer, evaluated, f"{folder}/model")
    found["metrics"] = {"eval_loss": evaluated["eval_loss"], "eval_samples": trainers.SAMPLES}
    found["evaluated"] = {name: value for name, value in evaluated.items() if name.startswith(("eval_rewards", "eval_logps"))}
    rows = [row for row in trainer.state.log_history if "loss" in row]
    found |= {name: [row[name] for row in rows if name in row] for name in METRICS}
    if reference is not None and hasattr(trainer, "engine"):
        found["reference"] = sum(parameter.numel() for parameter in map(part_of, reference.parameters()))
    return found


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@cache
def native(dp: int, *, lora: bool) -> dict[str, Any]:
    from trl import DPOTrainer

    with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
        return run(DPOTrainer, folder, lora=lora, gradient_accumulation_steps=2 * dp)


def on_plait(rank: int, world: int, config: dict[str, Any], folder: str, lora: bool) -> dict[str, Any]:
    """Runs in a worker."""
    with trainers.launched(rank, world), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl

        from plait.hf import wrap

        return run(wrap(trl.DPOTrainer), folder, lora=lora, deepspeed=config)


@pytest.mark.parametrize(
    ("dp", "config", "lora"),
    [
        pytest.param(2, zero(3), False, id="zero3"),
        pytest.param(1, {"parallel": {"tp": 2}}, False, id="tp2"),
        pytest.param(2, zero(0), False, id="dp2"),
        pytest.param(2, zero(2), False, id="zero2"),
        pytest.param(2, zero(3), True, id="zero3-lora"),
        pytest.param(1, {"parallel": {"tp": 2}}, True, id="tp2-lora"),
    ],
)
def test_preferences_are_one_process(pool: Pool, tmp_path: Path, dp: int, config: dict[str, Any], lora: bool) -> None:
    """21 pairs. The reference is sharded as the policy is; of a model with adapters it is the model without them."""
    wanted = native(dp, lora=lora)
    found = pool.run(2, on_plait, config, str(tmp_path), lora)[0]
    close(found, wanted)
    assert found["num_tokens"] == wanted["num_tokens"]
    for name in ("evaluated", *METRICS[:-1]) if dp == 1 else ():  # TRL takes the mean over micro-batches, which ranks have at once
        assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name
    if config == zero(3) and not lora:
        whole = sum(parameter.numel() for parameter in trainers.model().parameters())
        assert found["reference"] == pytest.approx(whole / 2, rel=0.01)
