"""TRL's DPOTrainer on Plait's layouts equals one process: policy, reference, metrics, adapters."""

from functools import partial

import pytest
import torch

from plait.errors import InputError
from tests.parity import adapted, trainers, trl_runs, words
from tests.parity.trainers import close, zero

pytest.importorskip("trl")
pytestmark = pytest.mark.proof  # importing TRL takes ten seconds
METRICS = (
    "rewards/chosen",
    "rewards/margins",
    "rewards/accuracies",
    "logps/rejected",
    "num_tokens",
)


def dpo_trainer(wrap, folder, *, lora, rows=trainers.SAMPLES, compute_metrics=None, **settings):
    """Build a trainer with plain SGD, whose weights show the scale of gradients."""
    from trl import DPOConfig, DPOTrainer

    reference = None
    if not lora:
        reference = trainers.model()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(0.9)
    arguments = trainers.arguments(
        DPOConfig,
        folder,
        bf16=False,
        dataset_num_proc=None,
        optim="sgd",
        include_num_input_tokens_seen="no",
        beta=0.5,
        **settings,
    )
    return wrap(DPOTrainer)(
        model=adapted.model() if lora else trainers.model(),
        ref_model=reference,
        args=arguments,
        train_dataset=words.preferences(rows),
        eval_dataset=words.preferences(rows),
        processing_class=words.tokenizer(),
        compute_metrics=compute_metrics,
    )


@pytest.mark.parametrize(
    ("dp", "config", "lora"),
    [
        pytest.param(2, zero(3), False, id="zero3"),
        pytest.param(1, {"parallel": {"tp": 2}}, False, id="tp2"),
        pytest.param(2, zero(0), False, id="dp2"),
        pytest.param(2, zero(3), True, id="zero3-lora"),
        pytest.param(1, {"parallel": {"tp": 2}}, True, id="tp2-lora"),
    ],
)
def test_preferences_are_one_process(pool, tmp_path, dp, config, lora):
    """The reference is sharded as the policy is. With adapters it is the model without them."""
    expected = trl_runs.native(dpo_trainer, METRICS, dp, lora=lora)
    result = pool.run(2, trl_runs.on_plait, dpo_trainer, METRICS, config, str(tmp_path), lora)[0]
    close(result, expected)
    assert result["num_tokens"] == expected["num_tokens"]
    if dp == 1:
        # TRL averages over micro-batches, and two ranks have two of them at once.
        for name in ("evaluated", *METRICS[:-1]):
            assert result[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    if config == zero(3) and not lora:
        assert result["reference"] == pytest.approx(expected["reference"] / 2, rel=0.01)


# A trainer of `trl_runs` is cached by its function, so each number of rows needs one of its own.
TRAINERS = {rows: partial(dpo_trainer, rows=rows) for rows in (7, 19, 20, 21, 22, 23)}


@pytest.mark.parametrize(
    ("ranks", "rows"),
    [(2, 7), (2, 21), (2, 22), (2, 23), (3, 7), (3, 19), (3, 20), (3, 22), (3, 23)],
)
def test_every_remainder_of_rows(pool, tmp_path, ranks, rows):
    """Some ranks have fewer rows, or none, in the last batch of an epoch and of an evaluation."""
    expected = trl_runs.native(TRAINERS[rows], METRICS, ranks, lora=False)
    arguments = (TRAINERS[rows], METRICS, zero(2), str(tmp_path), False)
    result = pool.run(ranks, trl_runs.on_plait, *arguments)[0]
    close(result, expected)
    assert result["num_tokens"] == expected["num_tokens"]


def test_compute_metrics_is_refused(tmp_path):
    """An evaluation has two rows of logits per pair, so the first call is refused."""
    from plait.hf import wrap

    with trainers.launched_alone():
        trainer = dpo_trainer(wrap, str(tmp_path), lora=False, compute_metrics=lambda _: {})
        message = (
            r"DPOTrainer\(compute_metrics=\.\.\.\).*two rows of logits for every pair.*leave it out"
        )
        for call in (trainer.train, trainer.evaluate):
            with pytest.raises(InputError, match=message):
                call()
        assert trainer.engine is None

        trainer.compute_metrics = None
        assert trainer.evaluate()["eval_rewards/margins"] != 0
        trainer.end()
