"""TRL's DPOTrainer on Plait's layouts is the same in one process: policy, reference, metrics, adapters."""

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


def made(wrap, folder, *, lora, rows=trainers.SAMPLES, compute_metrics=None, **settings):
    """With plain SGD, whose weights follow the gradients themselves."""
    from trl import DPOConfig, DPOTrainer

    reference = None
    if not lora:
        reference = trainers.model()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(0.9)
    fixed = {
        "bf16": False,
        "dataset_num_proc": None,
        "optim": "sgd",
        "include_num_input_tokens_seen": "no",
        "beta": 0.5,
    }
    return wrap(DPOTrainer)(
        model=adapted.model() if lora else trainers.model(),
        ref_model=reference,
        args=trainers.arguments(DPOConfig, folder, **fixed, **settings),
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
        pytest.param(2, zero(2), False, id="zero2"),
        pytest.param(2, zero(3), True, id="zero3-lora"),
        pytest.param(1, {"parallel": {"tp": 2}}, True, id="tp2-lora"),
    ],
)
def test_preferences_are_one_process(pool, tmp_path, dp, config, lora):
    """21 pairs. The reference is sharded as the policy is; of a model with adapters it is the model without them."""
    wanted = trl_runs.native(made, METRICS, dp, lora=lora)
    found = pool.run(2, trl_runs.on_plait, made, METRICS, config, str(tmp_path), lora)[0]
    close(found, wanted)
    assert found["num_tokens"] == wanted["num_tokens"]
    for name in (
        ("evaluated", *METRICS[:-1]) if dp == 1 else ()
    ):  # TRL takes the mean over micro-batches, which ranks have at once
        assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name
    if config == zero(3) and not lora:
        assert found["reference"] == pytest.approx(wanted["reference"] / 2, rel=0.01)


REMAINDERS = {rows: partial(made, rows=rows) for rows in (7, 19, 20, 21, 22, 23)}


@pytest.mark.parametrize(
    ("ranks", "rows"),
    [(2, 7), (2, 21), (2, 22), (2, 23), (3, 7), (3, 19), (3, 20), (3, 22), (3, 23)],
)
def test_every_remainder_of_rows(pool, tmp_path, ranks, rows):
    """The last step of an epoch has fewer rows on some ranks, or none. Evaluation too."""
    expected = trl_runs.native(REMAINDERS[rows], METRICS, ranks, lora=False)
    result = pool.run(
        ranks, trl_runs.on_plait, REMAINDERS[rows], METRICS, zero(2), str(tmp_path), False
    )[0]
    close(result, expected)


def test_metrics_of_ones_own_are_refused(tmp_path):
    """An evaluation has two rows of logits for every pair. The trainer is refused at its first call, without a change to the model."""
    from plait.hf import wrap

    with trainers.launched_alone():
        trainer = made(wrap, str(tmp_path), lora=False, compute_metrics=lambda prediction: {})
        for call in (trainer.train, trainer.evaluate):
            with pytest.raises(
                InputError,
                match=r"DPOTrainer\(compute_metrics=\.\.\.\).*two rows of logits for every pair.*leave it out",
            ):
                call()
        assert trainer.engine is None
        trainer.compute_metrics = None
        assert trainer.evaluate()["eval_rewards/margins"] != 0
        trainer.end()
