"""`predict_with_generate` on layouts, against Transformers' Seq2SeqTrainer in one process."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from tests.parity import trainers

NEW_TOKENS = 5
SETTINGS: dict[str, Any] = {
    "predict_with_generate": True,
    "generation_max_length": trainers.LENGTH + NEW_TOKENS,
    # Three full batches: Transformers gives the loss of a smaller last batch the same weight.
    "per_device_eval_batch_size": 7,
}


class TokenIds:
    """The attributes of a tokenizer that a Trainer reads."""

    pad_token_id = 0
    eos_token_id = 2


def prompts():
    """Return the samples, padded on the left."""
    rows = []
    for sample in trainers.samples():
        padding = trainers.LENGTH - int(sample["attention_mask"].sum())
        rows.append({name: tensor.roll(padding) for name, tensor in sample.items()})
    return rows


def bart():
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    fields = {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "vocab_size": trainers.VOCABULARY,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    }
    torch.manual_seed(3)
    return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **fields))


def build(encoder):
    """Return a decoder, or an encoder and decoder that generate with beams."""
    model = bart() if encoder else trainers.model()
    model.generation_config.pad_token_id = TokenIds.pad_token_id
    model.generation_config.eos_token_id = TokenIds.eos_token_id
    if encoder:
        model.generation_config.num_beams = 2
    return model


def metrics_of(prediction):
    return {
        "samples": len(prediction.predictions),
        "first": float(prediction.predictions[:, -NEW_TOKENS:].mean()),
    }


def run(trainer_class, arguments_class, folder, encoder, **settings):
    """Train, and return the generated tokens of all samples and the metrics."""
    trainer = trainer_class(
        model=build(encoder),
        args=trainers.arguments(arguments_class, folder, **SETTINGS, **settings),
        processing_class=TokenIds(),
        data_collator=default_collate,
        train_dataset=prompts(),
        eval_dataset=prompts(),
        compute_metrics=metrics_of,
    )
    trainer.train()
    metrics = trainer.evaluate()
    output = trainer.predict(prompts())
    assert output.label_ids.shape[0] == trainers.SAMPLES
    names = ("eval_loss", "eval_samples", "eval_first")
    return output.predictions.tolist(), {name: metrics[name] for name in names}


@cache
def native(dp, encoder):
    """Run Transformers' trainer in one process."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
        arguments = (Seq2SeqTrainer, Seq2SeqTrainingArguments, folder, encoder)
        return run(*arguments, gradient_accumulation_steps=2 * dp)


def on_plait(rank, world, config, folder, encoder):
    """Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Seq2SeqTrainer, Seq2SeqTrainingArguments

        return run(Seq2SeqTrainer, Seq2SeqTrainingArguments, folder, encoder, deepspeed=config)


@pytest.mark.parametrize(
    ("dp", "config", "encoder"),
    [
        pytest.param(1, {"parallel": {"pp": 2}}, False, id="pp2"),
        pytest.param(2, trainers.zero(3), False, id="zero3"),
        pytest.param(1, {"parallel": {"tp": 2}}, False, id="tp2", marks=pytest.mark.proof),
        pytest.param(2, trainers.zero(0), False, id="dp2", marks=pytest.mark.proof),
        pytest.param(2, trainers.zero(0), True, id="encoder", marks=pytest.mark.proof),
        pytest.param(2, trainers.zero(1), True, id="encoder-zero1", marks=pytest.mark.proof),
        pytest.param(2, trainers.zero(3), True, id="encoder-zero3"),
    ],
)
def test_generated_tokens_equal_one_process(pool, tmp_path, dp, config, encoder):
    expected_tokens, expected_metrics = native(dp, encoder)
    for tokens, metrics in pool.run(2, on_plait, config, str(tmp_path), encoder):
        assert tokens == expected_tokens and metrics["eval_samples"] == trainers.SAMPLES
        assert metrics == pytest.approx(expected_metrics, rel=1e-5)
