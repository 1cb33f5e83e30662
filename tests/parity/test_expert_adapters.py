"""LoRA on the parameters of experts (PEFT's `target_parameters`) is one process on every layout, in float64."""

from itertools import product

import pytest
import torch

import plait
from plait.errors import ModelError
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
CASES = cases_of("""
    mixtral zero1 dp2 adapted full
    qwen3_moe zero3 dp2 adapted balance unused
    mixtral ep2 dp2 adapted one balance
    deepseek_v3 zero3 ep2 dp2 adapted full
    mixtral zero1 pp2 ep2 dp2 adapted
""")
MORE = [
    case_of("gpt_oss zero2 dp2 adapted selective"),
    Case("gpt_oss", 1, (("ep", 2),), dp=4, adapted=("down_proj",)),
    Case("mixtral", 0, dp=2, adapted=("gate_up_proj",)),
    *(
        case_of(f"{family} zero{stage} {axis} dp2 adapted {kind}")
        for family, stage, axis, kind in product(
            ("mixtral", "gpt_oss", "deepseek_v3"),
            (0, 1, 2, 3),
            ("", "ep2", "pp2"),
            ("", "batched_mm"),
        )
    ),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.proof) for case in MORE)],
    ids=lambda case: f"{case.name}-{case.kind}-{len(case.adapted)}",
)
def test_equals_one_process(pool, case):
    """Losses, gradients, norms and weights to 1e-10."""
    assert_equal(case, pool.run(case.world, train, case))


def adapted_experts(dtype=torch.float32):
    """The Trainer's model with experts, and adapters on them."""
    return with_adapters(trainers.experts_alone(dtype), BOTH)


def trainer(rank, world, config, folder):
    """A run of the Trainer. Runs in a worker."""
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
def test_trainer(pool, tmp_path, config):
    """PEFT opens the saved adapters."""
    from peft import PeftModel

    wanted = trainers.native(2, made=adapted_experts, learning_rate=3e-2)
    for found in pool.run(2, trainer, config, str(tmp_path))[:1]:
        close(found, wanted)
    assert any("experts" in name for name in wanted["weights"])
    opened = PeftModel.from_pretrained(trainers.experts_alone(), str(tmp_path / "model"))
    for name, tensor in opened.state_dict().items():
        if "lora_" in name:
            saved = wanted["weights"][name.replace(".default", "")]
            torch.testing.assert_close(tensor, saved, rtol=1e-5, atol=1e-5)


def disabled(rank, world, case):
    """Logits with and without the adapters, and of the model that was released. Runs in a worker."""
    ids = torch.arange(24).view(2, 12)
    model = build(case)
    engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
    found = [engine.predict({"input_ids": ids})]
    with model.disable_adapter():
        found.append(engine.predict({"input_ids": ids}))
    if not case.stage and not case.degrees:
        engine.close()
        assert not [m for m in model.modules() if "forward" in vars(m)]
        with torch.no_grad():
            found.append(model(input_ids=ids).logits)
    return found


@pytest.mark.parametrize(
    "case",
    cases_of("mixtral dp2 adapted\nmixtral zero3 dp2 adapted\nmixtral zero1 ep2 dp2 adapted"),
    ids=lambda case: case.name,
)
def test_disabled_adapters(pool, case):
    """Without adapters the model is the base model, and a released model is PEFT's again."""
    model = build(case).eval()
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        with model.disable_adapter():
            base = model(input_ids=ids).logits
    assert not torch.allclose(adapted, base)
    for logits in pool.run(2, disabled, case):
        for found, wanted in zip(logits, (adapted, base, adapted), strict=False):
            torch.testing.assert_close(getattr(found, "logits", found), wanted, rtol=0, atol=1e-10)


def split(rank, world, case):
    """Runs in a worker."""
    with pytest.raises(ModelError) as raised:
        plait.initialize(build(case), configured(case), loss_fn=plait.causal_lm_loss)
    return str(raised.value)


def test_tensor_parallelism_is_refused(pool):
    for message in pool.run(2, split, case_of("mixtral tp2 adapted")):
        assert "has an adapter on its parameter down_proj (target_parameters)" in message
        assert "parallel.ep" in message
