"""`predict_with_generate` on Plait's layouts is Transformers' own Seq2SeqTrainer in one process."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch

from tests.parity import trainers

NEW = 5
SETTINGS: dict[str, Any] = {
    "predict_with_generate": True,
    "generation_max_length": trainers.LENGTH + NEW,
    "per_device_eval_batch_size": 7,
}
"""Three full batches: Transformers counts the loss of a last one that is not full as often as that of others."""


class Words:
    """As much of a tokenizer as a Trainer reads."""

    pad_token_id, eos_token_id = 0, 2


def prompts():
    """Padded on the left."""
    found = []
    for sample in trainers.samples():
        length = int(sample["attention_mask"].sum())
        found.append(
            {name: tensor.roll(trainers.LENGTH - length) for name, tensor in sample.items()}
        )
    return found


def small(**fields):
    """A Bart: with an encoder and a decoder."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    widths = {
        "d_model": 16,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "vocab_size": trainers.VOCABULARY,
        "dropout": 0.0,
    }
    marks = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    }
    torch.manual_seed(3)
    return AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model("bart", **sizes, **widths, **marks, max_position_embeddings=32)
    )


def made(encoder):
    found = small() if encoder else trainers.model()
    found.generation_config.eos_token_id, found.generation_config.pad_token_id = 2, 0
    if encoder:
        found.generation_config.num_beams = 2
    return found


def run(trainer_kind, arguments_kind, folder, encoder, **settings):
    """(tokens of all samples after training, metrics)."""
    args = trainers.arguments(arguments_kind, folder, **SETTINGS, **settings)
    trainer = trainer_kind(
        model=made(encoder),
        args=args,
        processing_class=Words(),
        data_collator=lambda rows: {
            name: torch.stack([row[name] for row in rows]) for name in rows[0]
        },
        train_dataset=prompts(),
        eval_dataset=prompts(),
        compute_metrics=lambda prediction: {
            "samples": len(prediction.predictions),
            "first": float(prediction.predictions[:, -NEW:].mean()),
        },
    )
    trainer.train()
    metrics = trainer.evaluate()
    found = trainer.predict(prompts())
    kept = {
        name: value
        for name, value in metrics.items()
        if name in ("eval_loss", "eval_samples", "eval_first")
    }
    assert found.label_ids.shape[0] == trainers.SAMPLES
    return found.predictions.tolist(), kept


@cache
def native(dp, encoder):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
        return run(
            Seq2SeqTrainer,
            Seq2SeqTrainingArguments,
            folder,
            encoder,
            gradient_accumulation_steps=2 * dp,
        )


def on_plait(rank, world, config, folder, encoder):
    """Runs in a worker."""
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
def test_it_is_one_process(pool, tmp_path, dp, config, encoder):
    """All tokens of 21 samples, in three batches; an encoder with beams too."""
    tokens, metrics = native(dp, encoder)
    for found, scores in pool.run(2, on_plait, config, str(tmp_path), encoder):
        assert found == tokens and scores["eval_samples"] == trainers.SAMPLES
        assert scores == pytest.approx(metrics, rel=1e-5)
