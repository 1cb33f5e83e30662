"""TRL's SFTTrainer on layouts, against the same in one process.

TRL computes the head of the model from its weight.
"""

from dataclasses import fields

import pytest

from plait.cluster.layout import Layout
from plait.errors import ConfigError, InputError
from plait.hf.fields import FIELDS, TRL, examined
from tests.parity import adapted, trainers, trl_runs, words
from tests.parity.refusals import message_of
from tests.parity.trainers import close, zero

pytest.importorskip("trl")
pytestmark = pytest.mark.proof  # importing TRL takes ten seconds
METRICS = ("mean_token_accuracy", "entropy", "num_tokens")
TP2 = {"parallel": {"tp": 2}}


def sft(wrap, folder, *, lora, **settings):
    """Return a trainer with TRL's default of recomputed blocks.

    The optimizer is plain SGD, with which weights follow the gradients.
    """
    from trl import SFTConfig, SFTTrainer

    settings = {"bf16": False, "dataset_num_proc": None, "optim": "sgd", **settings}
    return wrap(SFTTrainer)(
        model=adapted.model() if lora else trainers.model(),
        args=trainers.arguments(SFTConfig, folder, **settings),
        train_dataset=words.texts(),
        eval_dataset=words.texts(),
        processing_class=words.tokenizer(),
    )


@pytest.mark.parametrize(
    ("dp", "config", "lora"),
    [
        pytest.param(2, zero(3), False, id="zero3"),
        pytest.param(1, TP2, True, id="tp2-lora"),
        pytest.param(1, TP2, False, id="tp2"),
        pytest.param(2, zero(3), True, id="zero3-lora"),
        pytest.param(2, zero(0), False, id="dp2"),
    ],
)
def test_supervised_fine_tuning_is_one_process(pool, tmp_path, dp, config, lora):
    expected = trl_runs.native(sft, METRICS, dp, lora=lora)
    actual = pool.run(2, trl_runs.on_plait, sft, METRICS, config, str(tmp_path), lora)[0]
    close(actual, expected)
    assert actual["num_tokens"] == expected["num_tokens"]
    if dp == 1:
        # TRL takes the mean over micro-batches, which ranks of dp have at the same time.
        assert actual["entropy"] == pytest.approx(expected["entropy"], rel=1e-5)


def dynamic_sft(wrap, folder, *, lora, **settings):
    """TRL computes this loss from the token counts of an evaluation, too."""
    return sft(wrap, folder, lora=lora, loss_type="dft", **settings)


@pytest.mark.parametrize(("dp", "config"), [(2, zero(3)), (1, TP2)])
def test_dynamic_fine_tuning_is_one_process(pool, tmp_path, dp, config):
    expected = trl_runs.native(dynamic_sft, (), dp, lora=False)
    actual = pool.run(2, trl_runs.on_plait, dynamic_sft, (), config, str(tmp_path), False)[0]
    close(actual, expected)


def packed_sft(wrap, folder, *, lora, **settings):
    """Rows of 16 tokens have several texts, each with its own positions."""
    return sft(wrap, folder, lora=lora, packing=True, max_length=16, **settings)


@pytest.mark.parametrize(("dp", "config"), [(2, zero(3)), (1, TP2), (2, zero(0))])
def test_packed_rows_are_those_of_one_process(pool, tmp_path, dp, config):
    expected = trl_runs.native(packed_sft, (), dp, lora=False)
    actual = pool.run(2, trl_runs.on_plait, packed_sft, (), config, str(tmp_path), False)[0]
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert actual["metrics"] == pytest.approx(expected["metrics"], rel=1e-5)


def test_every_field_is_known():
    """A release of TRL with a new field fails here, and not in a user's run."""
    import trl

    known = FIELDS.keys() | TRL.keys()
    names = {field.name for config in (trl.SFTConfig, trl.DPOConfig) for field in fields(config)}
    assert names <= known and set(TRL) <= names


@pytest.mark.parametrize(
    ("module", "name", "generates"),
    [
        ("gkd", "GKDTrainer", True),
        ("gold", "GOLDTrainer", True),
        ("kto", "KTOTrainer", False),
        ("orpo", "ORPOTrainer", False),
    ],
)
def test_other_trainers_of_trl_are_refused(module, name, generates):
    """Subclasses of the supported trainers are refused, too, each for its own reason."""
    from plait.hf import wrap

    experimental = pytest.importorskip(f"trl.experimental.{module}", exc_type=ImportError)
    message = message_of(wrap(getattr(experimental, name)), error=InputError)
    assert message.startswith(f"{name}: ") and "use SFTTrainer or DPOTrainer" in message
    assert ("generates between steps" in message) is generates


def test_grpo_and_unsupported_fields_are_refused(tmp_path):
    import trl

    from plait.hf import wrap

    reason = "GRPOTrainer: it generates between .* use SFTTrainer or DPOTrainer"
    with trainers.launched_alone(), pytest.raises(InputError, match=reason):
        wrap(trl.GRPOTrainer)(trainers.model(), reward_funcs=len)

    unsupported = {"precompute_ref_log_probs", "sync_ref_model", "activation_offloading"}
    settings = {"bf16": False, **dict.fromkeys(unsupported, True)}
    problems = examined(trainers.arguments(trl.DPOConfig, str(tmp_path), **settings), Layout())[0]
    assert {problem.field.rpartition(".")[2] for problem in problems} == unsupported


def train_in_a_pipeline(rank, world, folder):
    """Runs on every rank."""
    arguments = (rank, world, sft, METRICS, {"parallel": {"pp": 2}}, folder)
    return message_of(trl_runs.on_plait, *arguments, lora=False, error=ConfigError)


def test_pipelines_are_refused(pool, tmp_path):
    for message in pool.run(2, train_in_a_pipeline, str(tmp_path)):
        assert "no stage can run" in message
