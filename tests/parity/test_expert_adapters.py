"""LoRA on the parameters of experts (PEFT's `target_parameters`) on every layout, in float64."""

from itertools import product

import pytest
import torch

import plait
from plait.errors import ModelError
from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.experts import (
    Case,
    assert_equal,
    build,
    case_of,
    cases_of,
    configured,
    train,
    with_adapters,
)
from tests.parity.trainers import close, zero

pytest.importorskip("peft")
BOTH = ("gate_up_proj", "down_proj")
QUICK = cases_of("""
    mixtral zero1 dp2 adapted full
    qwen3_moe zero3 dp2 adapted balance unused
    mixtral ep2 dp2 adapted one balance
    deepseek_v3 zero3 ep2 dp2 adapted full
    mixtral zero1 pp2 ep2 dp2 adapted
""")
LONG = [
    case_of("gpt_oss zero2 dp2 adapted selective"),
    Case("gpt_oss", 1, (("ep", 2),), dp=4, adapted=("down_proj",)),
    Case("mixtral", 0, dp=2, adapted=("gate_up_proj",)),
]
for family, stage, axis, kind in product(
    ("mixtral", "gpt_oss", "deepseek_v3"), range(4), ("", "ep2", "pp2"), ("", "batched_mm")
):
    LONG.append(case_of(f"{family} zero{stage} {axis} dp2 adapted {kind}"))
IDS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize(
    "case",
    proof_after(
        len(QUICK),
        [*QUICK, *LONG],
        name=lambda case: f"{case.name}-{case.kind}-{len(case.adapted)}",
    ),
)
def test_equals_one_process(pool, case):
    assert_equal(case, pool.run(case.world, train, case))


def adapted_experts(dtype=torch.float32):
    """Build the Trainer's model with experts, and adapters on them."""
    return with_adapters(trainers.experts_alone(dtype), BOTH)


def train_with_trainer(rank, world, config, folder):
    """Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return trainers.run(
            Trainer,
            TrainingArguments,
            folder,
            made=adapted_experts,
            deepspeed=config,
            learning_rate=3e-2,
            save_strategy="steps",
            save_steps=2,
        )


@pytest.mark.parametrize(
    "config", [zero(3), {"parallel": {"ep": 2}, **zero(1)}], ids=["zero3", "ep2-zero1"]
)
def test_the_trainers_adapters_open_in_peft(pool, tmp_path, config):
    from peft import PeftModel

    expected = trainers.native(2, made=adapted_experts, learning_rate=3e-2)
    close(pool.run(2, train_with_trainer, config, str(tmp_path))[0], expected)
    assert any("experts" in name for name in expected["weights"])

    loaded = PeftModel.from_pretrained(trainers.experts_alone(), str(tmp_path / "model"))
    for name, tensor in loaded.state_dict().items():
        if "lora_" in name:
            saved = expected["weights"][name.replace(".default", "")]
            torch.testing.assert_close(tensor, saved, rtol=1e-5, atol=1e-5)


def logits_without_adapters(rank, world, case):
    """Return the logits with adapters, without, and after the engine. Runs on every rank."""
    model = build(case)
    engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
    with_adapters = engine.predict({"input_ids": IDS})
    with model.disable_adapter():
        without_adapters = engine.predict({"input_ids": IDS})
    if case.stage or case.degrees:
        # A rank keeps its shards when the engine is closed.
        return [with_adapters, without_adapters]

    engine.close()
    assert not [module for module in model.modules() if "forward" in vars(module)]
    with torch.no_grad():
        released = model(input_ids=IDS)
    return [with_adapters, without_adapters, released.logits]


@pytest.mark.parametrize(
    "case",
    cases_of("mixtral dp2 adapted\nmixtral zero3 dp2 adapted\nmixtral zero1 ep2 dp2 adapted"),
    ids=lambda case: case.name,
)
def test_disabled_adapters(pool, case):
    """The model without adapters is the base model, and a released model is PEFT's again."""
    model = build(case).eval()
    with torch.no_grad():
        adapted = model(input_ids=IDS).logits
        with model.disable_adapter():
            base = model(input_ids=IDS).logits
    assert not torch.allclose(adapted, base)
    for outputs in pool.run(2, logits_without_adapters, case):
        for output, expected in zip(outputs, (adapted, base, adapted), strict=False):
            logits = getattr(output, "logits", output)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def initialize_with_tensor_parallelism(rank, world, case):
    """Return the message of the refusal. Runs on every rank."""
    with pytest.raises(ModelError) as error:
        plait.initialize(build(case), configured(case), loss_fn=plait.causal_lm_loss)
    return str(error.value)


def test_tensor_parallelism_is_refused(pool):
    case = case_of("mixtral tp2 adapted")
    for message in pool.run(2, initialize_with_tensor_parallelism, case):
        assert "has an adapter on its parameter down_proj (target_parameters)" in message
        assert "parallel.ep" in message
