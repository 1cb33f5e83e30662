"""TRL's SFTTrainer on Plait's layouts is the same in one process, with its head that TRL computes from the weight itself."""

from __future__ import annotations

import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import ConfigError, InputError
from tests.parity import adapted, trainers
from tests.parity.trainers import close, zero
from tests.pool import Pool

pytest.importorskip("trl")
pytestmark = pytest.mark.proof  # importing TRL takes ten seconds
METRICS = ("mean_token_accuracy", "entropy", "num_tokens")


def tokenizer() -> Any:
    """Of as many words as the model has rows."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(trainers.VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w2", unk_token="w1")


def texts() -> Any:
    """Of different lengths."""
    import datasets

    draw = torch.Generator().manual_seed(5)

    def words(count: int) -> str:
        return " ".join(f"w{index}" for index in torch.randint(3, trainers.VOCABULARY, (count,), generator=draw).tolist())

    return datasets.Dataset.from_list([{"text": words(4 + index % 5)} for index in range(trainers.SAMPLES)])


def run(kind: Any, folder: str, *, lora: bool, **settings: Any) -> dict[str, Any]:
    """Train with TRL's own default of recomputed blocks, evaluate, save."""
    from trl import SFTConfig

    trainer = kind(
        model=adapted.model() if lora else trainers.model(),
        args=trainers.arguments(SFTConfig, folder, bf16=False, dataset_num_proc=None, **settings),
        train_dataset=texts(),
        eval_dataset=texts(),
        processing_class=tokenizer(),
    )
    trainer.train()
    evaluated = trainer.evaluate()
    trainer.save_model(f"{folder}/model")
    found = trainers.result(trainer, evaluated, f"{folder}/model")
    found["metrics"] = {"eval_loss": evaluated["eval_loss"], "eval_samples": trainers.SAMPLES}
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return found | {name: [row[name] for row in rows] for name in METRICS}


@cache
def native(dp: int, *, lora: bool) -> dict[str, Any]:
    from trl import SFTTrainer

    with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
        return run(SFTTrainer, folder, lora=lora, gradient_accumulation_steps=2 * dp)


def on_plait(rank: int, world: int, config: dict[str, Any], folder: str, lora: bool) -> dict[str, Any]:
    """Runs in a worker."""
    with trainers.launched(rank, world), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import trl

        from plait.hf import wrap

        return run(wrap(trl.SFTTrainer), folder, lora=lora, deepspeed=config)


@pytest.mark.parametrize(
    ("dp", "config", "lora"),
    [
        pytest.param(2, zero(3), False, id="zero3"),
        pytest.param(1, {"parallel": {"tp": 2}}, True, id="tp2-lora"),
        pytest.param(1, {"parallel": {"tp": 2}}, False, id="tp2"),
        pytest.param(2, zero(3), True, id="zero3-lora"),
        pytest.param(2, zero(0), False, id="dp2"),
    ],
)
def test_supervised_fine_tuning_is_one_process(pool: Pool, tmp_path: Path, dp: int, config: dict[str, Any], lora: bool) -> None:
    wanted = native(dp, lora=lora)
    found = pool.run(2, on_plait, config, str(tmp_path), lora)[0]
    close(found, wanted)
    assert found["num_tokens"] == wanted["num_tokens"]
    if dp == 1:  # TRL takes the mean over micro-batches, which ranks have at once
        assert found["entropy"] == pytest.approx(wanted["entropy"], rel=1e-5)


def refused(rank: int, world: int, folder: str) -> str:
    """Runs in a worker."""
    with pytest.raises(ConfigError) as raised:
        on_plait(rank, world, {"parallel": {"pp": 2}}, folder, lora=False)
    return str(raised.value)


def test_what_is_refused(pool: Pool, tmp_path: Path) -> None:
    import trl

    from plait.hf import wrap

    with trainers.launched_alone(), pytest.raises(InputError, match="only SFTTrainer of TRL"):
        wrap(trl.DPOTrainer)(trainers.model(), args=trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False))
    assert all("no stage can run" in said for said in pool.run(2, refused, str(tmp_path)))
