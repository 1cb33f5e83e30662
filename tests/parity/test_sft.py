"""TRL's SFTTrainer on Plait's layouts is the same in one process, with its head that TRL computes from the weight itself."""

from dataclasses import fields

import pytest

from plait.cluster.layout import Layout
from plait.errors import ConfigError, InputError
from plait.hf.fields import FIELDS, TRL, examined
from tests.parity import adapted, trainers, trl_runs, words
from tests.parity.trainers import close, zero

pytest.importorskip("trl")
pytestmark = pytest.mark.proof  # importing TRL takes ten seconds
METRICS = ("mean_token_accuracy", "entropy", "num_tokens")


def made(wrap, folder, *, lora, **settings):
    """With TRL's own default of recomputed blocks and plain SGD, whose weights follow the gradients themselves."""
    from trl import SFTConfig, SFTTrainer

    return wrap(SFTTrainer)(
        model=adapted.model() if lora else trainers.model(),
        args=trainers.arguments(
            SFTConfig, folder, bf16=False, dataset_num_proc=None, optim="sgd", **settings
        ),
        train_dataset=words.texts(),
        eval_dataset=words.texts(),
        processing_class=words.tokenizer(),
    )


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
def test_supervised_fine_tuning_is_one_process(pool, tmp_path, dp, config, lora):
    wanted = trl_runs.native(made, METRICS, dp, lora=lora)
    found = pool.run(2, trl_runs.on_plait, made, METRICS, config, str(tmp_path), lora)[0]
    close(found, wanted)
    assert found["num_tokens"] == wanted["num_tokens"]
    if dp == 1:  # TRL takes the mean over micro-batches, which ranks have at once
        assert found["entropy"] == pytest.approx(wanted["entropy"], rel=1e-5)


def dynamic(wrap, folder, *, lora, **settings):
    """TRL's loss of dynamic fine-tuning, which it computes from the counts of an evaluation too."""
    return made(wrap, folder, lora=lora, loss_type="dft", **settings)


@pytest.mark.parametrize(("dp", "config"), [(2, zero(3)), (1, {"parallel": {"tp": 2}})])
def test_dynamic_fine_tuning_is_one_process(pool, tmp_path, dp, config):
    wanted = trl_runs.native(dynamic, (), dp, lora=False)
    found = pool.run(2, trl_runs.on_plait, dynamic, (), config, str(tmp_path), False)[0]
    close(found, wanted)


def packed(wrap, folder, *, lora, **settings):
    """Several texts in a row of 16 tokens, with positions of their own."""
    return made(wrap, folder, lora=lora, packing=True, max_length=16, **settings)


@pytest.mark.parametrize(
    ("dp", "config"), [(2, zero(3)), (1, {"parallel": {"tp": 2}}), (2, zero(0))]
)
def test_packed_rows_are_those_of_one_process(pool, tmp_path, dp, config):
    wanted = trl_runs.native(packed, (), dp, lora=False)
    found = pool.run(2, trl_runs.on_plait, packed, (), config, str(tmp_path), False)[0]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5)


def refused(rank, world, folder):
    """Runs in a worker."""
    with pytest.raises(ConfigError) as raised:
        trl_runs.on_plait(rank, world, made, METRICS, {"parallel": {"pp": 2}}, folder, lora=False)
    return str(raised.value)


def test_every_field_is_known():
    """A release of TRL with a new field fails here, and not in a user's run."""
    import trl

    known = FIELDS.keys() | TRL.keys()
    theirs = {field.name for kind in (trl.SFTConfig, trl.DPOConfig) for field in fields(kind)}
    assert theirs <= known and set(TRL) <= theirs


@pytest.mark.parametrize(
    ("where", "name", "generates"),
    [
        ("gkd", "GKDTrainer", True),
        ("gold", "GOLDTrainer", True),
        ("kto", "KTOTrainer", False),
        ("orpo", "ORPOTrainer", False),
    ],
)
def test_other_trainers_of_trl(where, name, generates):
    """Also those that are subclasses of the two that are taken; each for its own reason."""
    from plait.hf import wrap

    module = pytest.importorskip(f"trl.experimental.{where}", exc_type=ImportError)
    with pytest.raises(InputError) as raised:
        wrap(getattr(module, name))()
    assert str(raised.value).startswith(f"{name}: ") and "use SFTTrainer or DPOTrainer" in str(
        raised.value
    )
    assert ("generates between steps" in str(raised.value)) is generates


def test_what_is_refused(pool, tmp_path):
    import trl

    from plait.hf import wrap

    with (
        trainers.launched_alone(),
        pytest.raises(
            InputError, match="GRPOTrainer: it generates between .* use SFTTrainer or DPOTrainer"
        ),
    ):
        wrap(trl.GRPOTrainer)(trainers.model(), reward_funcs=len)
    args = trainers.arguments(
        trl.DPOConfig,
        str(tmp_path),
        bf16=False,
        precompute_ref_log_probs=True,
        sync_ref_model=True,
        activation_offloading=True,
    )
    refused_fields = {"precompute_ref_log_probs", "sync_ref_model", "activation_offloading"}
    assert {
        problem.field.rpartition(".")[2] for problem in examined(args, Layout())[0]
    } == refused_fields
    assert all("no stage can run" in said for said in pool.run(2, refused, str(tmp_path)))
