"""Steps of a Trainer without processes: label smoothing of adapted models, and steps that a pipeline cannot run."""

from types import SimpleNamespace

import pytest

from plait.errors import InputError
from plait.hf.steps import run_pipeline, smoothing_of
from tests.parity import trainers


def test_labels_of_adapted_models_are_shifted():
    """PEFT's wrapper around the model, and adapters that Transformers adds to the model itself."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    added = trainers.model()
    added.add_adapter(lora)
    for model in (trainers.model(), peft.get_peft_model(trainers.model(), lora), added):
        assert smoothing_of(None, model).shifts


def test_more_micro_batches_than_a_pipeline_has():
    """A callback has raised gradient_accumulation_steps."""
    engine = SimpleNamespace(config=SimpleNamespace(batch=SimpleNamespace(accumulation=2)))
    with pytest.raises(
        InputError,
        match="gradient_accumulation_steps = 3: .* 2 micro-batches per step; set it to at most 2,",
    ):
        run_pipeline(engine, [{}] * 3, [1.0] * 3, max, max)
