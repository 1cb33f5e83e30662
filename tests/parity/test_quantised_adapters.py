"""LoRA adapters on weights that bitsandbytes keeps in 4 or 8 bits (QLoRA): on Plait's layouts the numbers of one process with Transformers'
Trainer. Where bitsandbytes is installed (`make bitsandbytes`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from plait.errors import ModelError
from tests.parity import adapted, trainers
from tests.parity.trainers import close, zero

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
SIZES = {"hidden_size": 64, "intermediate_size": 128}
"""Whole blocks of 64 weights with one scale in every row, which its kernels for CPUs need."""
SETTINGS = {"learning_rate": 3e-2, "save_strategy": "steps", "save_steps": 2}


def model(dtype, *, folder, bits):
    """The tiny model from a folder, quantised while it is loaded; adapters and what is computed in are float32."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = (
        {"load_in_8bit": True}
        if bits == 8
        else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    )
    settings: Any = BitsAndBytesConfig(**how)
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": "cpu"}, quantization_config=settings
    )
    kinds = {type(parameter).__name__ for parameter in base.parameters()}
    assert {8: "Int8Params", 4: "Params4bit"}[bits] in kinds
    return adapted.on(base)


@pytest.fixture
def base(tmp_path):
    trainers.model(**SIZES).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.parametrize(
    ("world", "dp", "config", "bits"),
    [
        *(pytest.param(2, 2, zero(stage), 4, id=f"zero{stage}") for stage in (0, 1, 2, 3)),
        pytest.param(2, 1, {"parallel": {"pp": 2}}, 4, id="pp2"),
        pytest.param(4, 2, {"parallel": {"pp": 2}, **zero(2)}, 4, id="pp2-zero2"),
        pytest.param(2, 2, zero(3), 8, id="8bit-zero3"),
        pytest.param(2, 1, {"parallel": {"pp": 2}}, 8, id="8bit-pp2"),
    ],
)
def test_it_is_one_process(pool, tmp_path, base, world, dp, config, bits):
    """Quantised weights are replicated on every rank, or on their stage's ranks; what else there is follows the ZeRO stage."""
    made = partial(model, folder=base, bits=bits)
    wanted = trainers.native(dp, made=made, **SETTINGS)
    found = pool.run(
        world, trainers.on_plait, config, str(tmp_path / "out"), {"made": made, **SETTINGS}
    )
    close(found[0], wanted)
    assert len(wanted["weights"]) == 2 * 2 * len(adapted.TARGETS)
    saved = [
        path.read_text() for path in (tmp_path / "out" / "checkpoint-2" / "plait").rglob("*.json")
    ]
    assert any("lora_A" in text for text in saved) and not any(
        "base_layer" in text for text in saved
    )


def goes_on(rank, world, config, folder, base, resume):
    """Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        args = trainers.arguments(
            TrainingArguments, folder, deepspeed=config, gradient_accumulation_steps=4, **SETTINGS
        )
        trainer = Trainer(
            model=model(torch.float32, folder=base, bits=4),
            args=args,
            train_dataset=trainers.samples(),
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainers.history(trainer)


def test_it_goes_on_in_a_pipeline(pool, tmp_path, base):
    made = partial(model, folder=base, bits=4)
    wanted = trainers.native(2, made=made, **SETTINGS)
    pool.run(2, trainers.on_plait, zero(2), str(tmp_path / "out"), {"made": made, **SETTINGS})
    resume = str(tmp_path / "out" / "checkpoint-2")
    for found in pool.run(
        2, goes_on, {"parallel": {"pp": 2}}, str(tmp_path / "then"), base, resume
    ):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-5), key


@pytest.mark.parametrize("config", [zero(2), {"parallel": {"pp": 2}}], ids=["zero2", "pp2"])
def test_in_bfloat16(pool, tmp_path, base, config):
    """Adapters are float32 and compute in bfloat16, as the loss of one process does to its rounding."""
    made = partial(model, folder=base, bits=4)
    dp = 1 if "parallel" in config else 2
    wanted = trainers.native(dp, made=made, **SETTINGS)
    found = pool.run(
        2,
        trainers.on_plait,
        config,
        str(tmp_path / "out"),
        {"made": made, "bf16": True, **SETTINGS},
    )[0]
    assert (
        found["loss"] == pytest.approx(wanted["loss"], rel=1e-2) and found["loss"] != wanted["loss"]
    )
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-2)


def refused(rank, world, folder, base):
    """Runs in a worker."""
    from accelerate.state import AcceleratorState

    said = []
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        for config in (
            {"parallel": {"tp": 2}},
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "nvme", "nvme_path": folder},
                }
            },
        ):
            AcceleratorState._reset_state(reset_partial_state=True)
            args = trainers.arguments(TrainingArguments, folder, deepspeed=config)
            with pytest.raises(ModelError) as raised:
                Trainer(
                    model=model(torch.float32, folder=base, bits=4),
                    args=args,
                    train_dataset=trainers.samples(),
                ).train()
            said.append(str(raised.value))
    return said


def test_what_is_refused(pool, tmp_path, base):
    for tensor, offload in pool.run(2, refused, str(tmp_path / "out"), base):
        assert "q_proj (Linear4bit) cannot be 'colwise'" in tensor
        assert "bitsandbytes, which stores scales apart from the values" in offload
