"""LoRA adapters on weights of 4 or 8 bits (QLoRA), against Transformers' Trainer in one process.

The tests run where bitsandbytes is installed (`make bitsandbytes`).
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from plait.errors import ModelError
from tests.parity import adapted, trainers
from tests.parity.trainers import close, zero

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
# Each row has whole blocks of 64 weights with one scale, as bitsandbytes' kernels for CPUs need.
SIZES = {"hidden_size": 64, "intermediate_size": 128}
SETTINGS = {"learning_rate": 3e-2, "save_strategy": "steps", "save_steps": 2}
PP2 = {"parallel": {"pp": 2}}


def quantised_model(dtype, *, folder, bits):
    """Load the tiny model quantised. Adapters and computations are float32."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if bits == 8:
        quantisation = BitsAndBytesConfig(load_in_8bit=True)
    else:
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": "cpu"}, quantization_config=quantisation
    )
    types = {type(parameter).__name__ for parameter in base.parameters()}
    assert {8: "Int8Params", 4: "Params4bit"}[bits] in types
    return adapted.on(base)


@pytest.fixture
def base(tmp_path):
    trainers.model(**SIZES).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.parametrize(
    ("world", "dp", "config", "bits"),
    [
        *(pytest.param(2, 2, zero(stage), 4, id=f"zero{stage}") for stage in (0, 1, 2, 3)),
        pytest.param(2, 1, PP2, 4, id="pp2"),
        pytest.param(4, 2, {**PP2, **zero(2)}, 4, id="pp2-zero2"),
        pytest.param(2, 2, zero(3), 8, id="8bit-zero3"),
        pytest.param(2, 1, PP2, 8, id="8bit-pp2"),
    ],
)
def test_equals_one_process(pool, tmp_path, base, world, dp, config, bits):
    """Quantised weights are replicated on the ranks, and adapters follow the ZeRO stage."""
    build = partial(quantised_model, folder=base, bits=bits)
    expected = trainers.native(dp, made=build, **SETTINGS)
    settings = {"made": build, **SETTINGS}
    actual = pool.run(world, trainers.on_plait, config, str(tmp_path / "out"), settings)[0]
    close(actual, expected)
    assert len(expected["weights"]) == 2 * 2 * len(adapted.TARGETS)

    checkpoint = tmp_path / "out" / "checkpoint-2" / "plait"
    manifests = "".join(path.read_text() for path in checkpoint.rglob("*.json"))
    assert "lora_A" in manifests and "base_layer" not in manifests


def resume(rank, world, config, folder, base, checkpoint):
    """Runs on every rank."""
    with trainers.launched(rank, world):
        model = quantised_model(torch.float32, folder=base, bits=4)
        settings = {"gradient_accumulation_steps": 4, **SETTINGS}
        trainer = trainers.trainer_of(folder, config, {"model": model}, **settings)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainers.history(trainer)


def test_a_checkpoint_resumes_in_a_pipeline(pool, tmp_path, base):
    build = partial(quantised_model, folder=base, bits=4)
    expected = trainers.native(2, made=build, **SETTINGS)
    settings = {"made": build, **SETTINGS}
    pool.run(2, trainers.on_plait, zero(2), str(tmp_path / "out"), settings)

    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    for actual in pool.run(2, resume, PP2, str(tmp_path / "then"), base, checkpoint):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert actual[key] == pytest.approx(expected[key], rel=1e-5), key


@pytest.mark.parametrize("config", [zero(2), PP2], ids=["zero2", "pp2"])
def test_bfloat16_is_close_to_float32(pool, tmp_path, base, config):
    """Adapters stay float32 and compute in bfloat16."""
    build = partial(quantised_model, folder=base, bits=4)
    dp = 1 if config is PP2 else 2
    expected = trainers.native(dp, made=build, **SETTINGS)
    settings = {"made": build, "bf16": True, **SETTINGS}
    actual = pool.run(2, trainers.on_plait, config, str(tmp_path / "out"), settings)[0]
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-2)
    assert actual["loss"] != expected["loss"]
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=5e-2)


def refusals(rank, world, folder, base):
    """Return the messages for tensor parallelism and states in files. Runs on every rank."""
    from accelerate.state import AcceleratorState

    states_in_files = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    messages = []

    def train(config):
        model = quantised_model(torch.float32, folder=base, bits=4)
        trainers.trainer_of(folder, config, {"model": model}).train()

    with trainers.launched(rank, world):
        for config in ({"parallel": {"tp": 2}}, {"zero_optimization": states_in_files}):
            AcceleratorState._reset_state(reset_partial_state=True)
            with pytest.raises(ModelError) as error:
                train(config)
            messages.append(str(error.value))
    return messages


def test_unsupported_layouts_are_refused(pool, tmp_path, base):
    for tensor, offload in pool.run(2, refusals, str(tmp_path / "out"), base):
        assert "q_proj (Linear4bit) cannot be 'colwise'" in tensor
        assert "bitsandbytes, which stores scales apart from the values" in offload
