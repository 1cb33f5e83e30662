"""LoRA adapters of PEFT train on Plait's layouts as in one process.

Checkpoints and optimizers hold the adapters and nothing else.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from plait.errors import ModelError
from tests.covers import proof_after
from tests.parity import adapted, context_parallel, trainers
from tests.parity.context_parallel import Case
from tests.parity.trainers import close, zero

pytest.importorskip("peft")
SETTINGS = {"learning_rate": 3e-2, "save_strategy": "steps", "save_steps": 2}


def trained(rank, world, config, folder, build_model=adapted.model):
    """Return the run, and the number of elements that this rank's optimizer holds.

    Runs on every rank.
    """
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        instances: list[Any] = []

        class RecordedTrainer(Trainer):
            def __init__(self, *args, **settings):
                super().__init__(*args, **settings)
                instances.append(self)

        result = trainers.run(
            RecordedTrainer,
            TrainingArguments,
            folder,
            made=build_model,
            deepspeed=config,
            **SETTINGS,
        )
        elements = 0
        for group in instances[0].optimizer.param_groups:
            for parameter in group["params"]:
                assert parameter.requires_grad
                elements += parameter.numel()
        return result, elements


TP2 = {"tp": 2}
PP2 = {"pp": 2}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp2": (2, 1, {"parallel": PP2}),
    "tp2": (2, 1, {"parallel": TP2}),
    "tp2-sequence": (2, 1, {"parallel": {**TP2, "sequence_parallel": True}}),
    **{f"zero{stage}": (2, 2, zero(stage)) for stage in (0, 1, 2, 3)},
    "tp2-zero3": (4, 2, {"parallel": TP2, **zero(3)}),
    "pp2-zero3": (4, 2, {"parallel": PP2, **zero(3)}),
    "pp2-tp2": (4, 1, {"parallel": {**PP2, **TP2}}),
}
"""Number of processes, of data-parallel ranks, and the configuration."""


@pytest.mark.parametrize("name", proof_after(1, LAYOUTS))
def test_adapters_equal_one_process(pool, tmp_path, name):
    from peft import PeftModel

    world, dp, config = LAYOUTS[name]
    expected = trainers.native(dp, made=adapted.model, learning_rate=3e-2)
    actual, elements = pool.run(world, trained, config, str(tmp_path))[0]
    close(actual, expected)
    # Two layers, and A and B of each target.
    assert len(expected["weights"]) == 2 * 2 * len(adapted.TARGETS)
    assert all(tensor.numel() for tensor in expected["weights"].values())
    trainable = [p.numel() for p in adapted.model().parameters() if p.requires_grad]
    assert elements <= sum(trainable)

    # The folder of adapters is one that PEFT opens.
    opened = PeftModel.from_pretrained(trainers.model(), str(tmp_path / "model"))
    for key, tensor in opened.state_dict().items():
        if "lora_" in key:
            weight = expected["weights"][key.replace(".default", "")]
            torch.testing.assert_close(tensor, weight, rtol=1e-5, atol=1e-5)

    manifests = (tmp_path / "checkpoint-2" / "plait").rglob("*.json")
    saved = "".join(path.read_text() for path in manifests)
    assert "lora_A" in saved and "embed_tokens" not in saved


@pytest.mark.parametrize("name", proof_after(1, ["tp2", "zero3"]))
def test_layers_that_train_in_full_equal_one_process(pool, tmp_path, name):
    """Layers in `modules_to_save` are replicated under tensor parallelism."""
    _, dp, config = LAYOUTS[name]
    expected = trainers.native(dp, made=adapted.with_copies, learning_rate=3e-2)
    actual, _ = pool.run(2, trained, config, str(tmp_path), adapted.with_copies)[0]
    close(actual, expected)
    assert any("lm_head" in name for name in expected["weights"])


SEQUENCE = (("sequence_parallel", True),)
RECOMPUTED = (*SEQUENCE, ("recompute", {"mode": "full"}))
TP = ("tp", 2)
DP = ("dp_shard", 2)
CASES = [
    Case("ring", "uneven", "llama", degrees=(TP,), settings=SEQUENCE, adapted=True),
    Case("ring", "packed", "gemma", degrees=(TP,), settings=SEQUENCE, adapted=True),
    Case("ring", "packed", degrees=(("cp", 2), TP), settings=RECOMPUTED, adapted=True),
    Case("ring", degrees=(("pp", 2), TP), settings=SEQUENCE, adapted=True),
    Case("ring", stage=3, degrees=(DP, TP), settings=SEQUENCE, adapted=True),
    Case("ring", "causal", "qwen3", stage=1, degrees=(DP, TP), settings=SEQUENCE, adapted=True),
]


@pytest.mark.parametrize("case", proof_after(1, CASES, name=lambda case: case.name))
def test_sequence_parallelism_equals_one_process(pool, case):
    context_parallel.assert_equal(case, pool.run(case.world, context_parallel.train, case))


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (TP2, {"dropout": 0.1}, "lora_dropout=0"),
    (
        {**TP2, "sequence_parallel": True},
        {"use_dora": True},
        "lora_magnitude_vector (DoRA)",
    ),
    (TP2, {"targets": ["lm_head"]}, "its output is split over the vocabulary"),
    (
        TP2,
        {"targets": ["embed_tokens"]},
        "Embedding, an adapter around a layer, but only LoRA on linear layers",
    ),
    (
        TP2,
        {"targets": ["q_proj"], "modules_to_save": ["down_proj"]},
        "trained in full (modules_to_save)",
    ),
]
"""Settings of `parallel`, those of the adapters, and text of the message."""


def resumed(rank, world, folder):
    """Save at ZeRO 1, go on under tensor parallelism, and collect refusals. Runs on every rank."""
    from accelerate.state import AcceleratorState

    with trainers.launched(rank, world):

        def trainer_of(config, accumulation, **settings):
            # Accelerate allows one configuration per process.
            AcceleratorState._reset_state(reset_partial_state=True)
            return trainers.trainer_of(
                folder,
                config,
                {"model": adapted.model(**settings)},
                gradient_accumulation_steps=accumulation,
                **SETTINGS,
            )

        trainer_of(zero(1), 2).train()
        resumed_trainer = trainer_of({"parallel": TP2}, 4)
        resumed_trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        messages = []
        for parallel, settings, _ in REFUSED:
            with pytest.raises(ModelError) as raised:
                trainer_of({"parallel": parallel}, 4, **settings).train()
            messages.append(str(raised.value))
        return trainers.history(resumed_trainer), messages


def test_adapters_resume_under_tensor_parallelism(pool, tmp_path):
    expected = trainers.native(2, made=adapted.model, learning_rate=3e-2)
    for history, messages in pool.run(2, resumed, str(tmp_path)):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert history[key] == pytest.approx(expected[key], rel=1e-5), key
        for (_, _, text), message in zip(REFUSED, messages, strict=True):
            assert text in message
    adapter_config = tmp_path / "checkpoint-2" / "adapter_config.json"
    assert json.loads(adapter_config.read_text())["r"] == 4
