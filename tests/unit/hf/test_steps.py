"""Steps of a Trainer, without processes."""

from types import SimpleNamespace

import pytest

from plait.errors import InputError
from plait.hf.steps import run_pipeline, smoothing_of
from tests.parity import trainers


def test_label_smoothing_shifts_the_labels_of_adapted_models():
    """PEFT wraps the model, and Transformers adds adapters to the model itself."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with_adapter = trainers.model()
    with_adapter.add_adapter(lora)
    for model in (trainers.model(), peft.get_peft_model(trainers.model(), lora), with_adapter):
        assert smoothing_of(None, model).shifts


def test_a_callback_cannot_add_micro_batches_to_a_pipeline():
    engine = SimpleNamespace(config=SimpleNamespace(batch=SimpleNamespace(accumulation=2)))
    message = "accumulation_steps = 3: .* 2 micro-batches per step; set it to at most 2,"
    with pytest.raises(InputError, match=message):
        run_pipeline(engine, [{}] * 3, [1.0] * 3, max, max)
