"""LoRA adapters of PEFT on Plait's layouts are those of one process; checkpoints and optimizer have nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.covers import proof_after
from tests.parity import adapted, context_parallel, trainers
from tests.parity.context_parallel import Case
from tests.parity.trainers import close, zero

pytest.importorskip("peft")
SETTINGS = {"learning_rate": 3e-2, "save_strategy": "steps", "save_steps": 2}


def adapters(rank, world, config, folder, build_model=adapted.model):
    """The run, and how many elements the optimizer of this rank has. Runs in a worker."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        kept: list[Any] = []

        class Kept(Trainer):
            def __init__(self, *args, **given):
                super().__init__(*args, **given)
                kept.append(self)

        found = trainers.run(
            Kept, TrainingArguments, folder, build_model=build_model, deepspeed=config, **SETTINGS
        )
        held = [p for group in kept[0].optimizer.param_groups for p in group["params"]]
        assert all(p.requires_grad for p in held)
        return found, sum(p.numel() for p in held)


TP2, PP2 = {"tp": 2}, {"pp": 2}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp2": (2, 1, {"parallel": PP2}),
    "tp2": (2, 1, {"parallel": TP2}),
    "tp2-sequence": (2, 1, {"parallel": {**TP2, "sequence_parallel": True}}),
    **{f"zero{stage}": (2, 2, zero(stage)) for stage in (0, 1, 2, 3)},
    "tp2-zero3": (4, 2, {"parallel": TP2, **zero(3)}),
    "pp2-zero3": (4, 2, {"parallel": PP2, **zero(3)}),
    "pp2-tp2": (4, 1, {"parallel": {**PP2, **TP2}}),
}
"""Processes, data-parallel ranks, and the file."""


@pytest.mark.parametrize("name", proof_after(1, LAYOUTS))
def test_adapters_are_one_process(pool, tmp_path, name):
    """Saved at full shape, as PEFT opens them."""
    from peft import PeftModel

    world, dp, config = LAYOUTS[name]
    wanted = trainers.native(dp, build_model=adapted.model, learning_rate=3e-2)
    found, elements = pool.run(world, adapters, config, str(tmp_path))[0]
    close(found, wanted)
    assert len(wanted["weights"]) == 2 * 2 * len(adapted.TARGETS) and all(
        tensor.numel() for tensor in wanted["weights"].values()
    )
    assert elements <= sum(p.numel() for p in adapted.model().parameters() if p.requires_grad)
    opened = PeftModel.from_pretrained(trainers.model(), str(tmp_path / "model"))
    for key, tensor in opened.state_dict().items():
        if "lora_" in key:
            trained = wanted["weights"][key.replace(".default", "")]
            torch.testing.assert_close(tensor, trained, rtol=1e-5, atol=1e-5)
    saved = [path.read_text() for path in (tmp_path / "checkpoint-2" / "plait").rglob("*.json")]
    assert any("lora_A" in text for text in saved) and not any(
        "embed_tokens" in text for text in saved
    )


@pytest.mark.parametrize("name", proof_after(1, ["tp2", "zero3"]))
def test_layers_that_are_trained_in_full(pool, tmp_path, name):
    """Head and embedding in `modules_to_save` are replicated under tensor parallelism."""
    _, dp, config = LAYOUTS[name]
    wanted = trainers.native(dp, build_model=adapted.with_copies, learning_rate=3e-2)
    found, _ = pool.run(2, adapters, config, str(tmp_path), adapted.with_copies)[0]
    close(found, wanted)
    assert any("lm_head" in name for name in wanted["weights"])


SEQUENCE = (("sequence_parallel", True),)
RECOMPUTED = (*SEQUENCE, ("recompute", {"mode": "full"}))
TP, DP = ("tp", 2), ("dp_shard", 2)
CASES = [
    Case("ring", "uneven", "llama", degrees=(TP,), settings=SEQUENCE, adapted=True),
    Case("ring", "packed", "gemma", degrees=(TP,), settings=SEQUENCE, adapted=True),
    Case("ring", "packed", degrees=(("cp", 2), TP), settings=RECOMPUTED, adapted=True),
    Case("ring", degrees=(("pp", 2), TP), settings=SEQUENCE, adapted=True),
    Case("ring", stage=3, degrees=(DP, TP), settings=SEQUENCE, adapted=True),
    Case("ring", "causal", "qwen3", stage=1, degrees=(DP, TP), settings=SEQUENCE, adapted=True),
]


@pytest.mark.parametrize("case", proof_after(1, CASES, name=lambda case: case.name))
def test_sequence_parallelism(pool, case):
    """Losses, gradients, norms and weights to 1e-10, in float64."""
    context_parallel.assert_equal(case, pool.run(case.world, context_parallel.train, case))


def resumed(rank, world, folder):
    """A run goes on under tensor parallelism. Also what is refused under it. Runs in a worker."""
    from accelerate.state import AcceleratorState

    from plait.errors import ModelError

    with trainers.launched(rank, world):

        def made(config, steps, **given):
            AcceleratorState._reset_state(reset_partial_state=True)
            model = {"model": adapted.model(**given)}
            return trainers.trainer_of(
                folder, config, model, gradient_accumulation_steps=steps, **SETTINGS
            )

        made(zero(1), 2).train()
        again = made({"parallel": {"tp": 2}}, 4)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        refused = []
        for config, given in (
            ({"tp": 2}, {"dropout": 0.1}),
            ({"tp": 2, "sequence_parallel": True}, {"use_dora": True}),
            ({"tp": 2}, {"targets": ["lm_head"]}),
            ({"tp": 2}, {"targets": ["embed_tokens"]}),
            ({"tp": 2}, {"targets": ["q_proj"], "modules_to_save": ["down_proj"]}),
        ):
            with pytest.raises(ModelError) as raised:
                made({"parallel": config}, 4, **given).train()
            refused.append(str(raised.value))
        return trainers.history(again), refused


def test_adapters_go_on_elsewhere(pool, tmp_path):
    wanted = trainers.native(2, build_model=adapted.model, learning_rate=3e-2)
    for found, refused in pool.run(2, resumed, str(tmp_path)):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-5), key
        words = (
            "lora_dropout=0",
            "lora_magnitude_vector (DoRA)",
            "its output is split over the vocabulary",
            "Embedding, an adapter around a layer, but only LoRA on linear layers",
            "trained in full (modules_to_save)",
        )
        assert all(word in text for word, text in zip(words, refused, strict=True)), refused
    assert json.loads((tmp_path / "checkpoint-2" / "adapter_config.json").read_text())["r"] == 4
