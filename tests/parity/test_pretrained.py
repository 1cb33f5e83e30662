"""`plait.from_pretrained`: each rank reads only its part of a folder's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import plait
from plait._torch.tensors import local_tensor
from plait.errors import InputError
from plait.model.experts import SCORE_CORRECTION_BIAS
from plait.parallel.materialise import is_meta
from plait.sharded.pretrained import weights_of
from tests.parity import experts, trainers
from tests.parity.full_tensors import assert_equal, full_weights
from tests.parity.trainers import zero

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
MIB = 2**20


def save(folder):
    """Save a bfloat16 model in several files, and return its weights in float32."""
    model = trainers.model(torch.bfloat16, tie_word_embeddings=True)
    model.generation_config.max_length = 7
    model.save_pretrained(folder, max_shard_size="20KB")
    return full_weights(model.float())


def loaded_weights(rank, world, folder):
    """Load with ZeRO 3, tensor parallelism and `parallelize`. Runs on every rank."""
    weights = []
    for layout in (zero(3), {"parallel": {"tp": 2}}):
        model = plait.from_pretrained(folder)
        assert is_meta(model)
        weights.append(full_weights(plait.initialize(model, CONFIG | layout).model))
    model = plait.from_pretrained(folder, model_class=LlamaForCausalLM)
    weights.append(full_weights(plait.parallelize(model, CONFIG).model))
    return weights


def evaluation_loss(rank, world, folder):
    """Evaluate with Plait's Trainer. Runs on every rank."""
    import plait.hf

    with trainers.launched(rank, world):
        trainer = plait.hf.Trainer(
            model=plait.from_pretrained(folder),
            args=trainers.arguments(TrainingArguments, folder),
            eval_dataset=trainers.samples(5),
            plait_config=zero(3),
        )
        return float(trainer.evaluate()["eval_loss"])


def test_each_rank_reads_its_slices(pool, tmp_path):
    expected = save(tmp_path)
    for layouts in pool.run(2, loaded_weights, str(tmp_path)):
        for weights in layouts:
            assert_equal(weights, expected)

    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    arguments = trainers.arguments(TrainingArguments, str(tmp_path))
    native = Trainer(model, arguments, eval_dataset=trainers.samples(5)).evaluate()
    losses = pool.run(2, evaluation_loss, str(tmp_path))
    assert losses == pytest.approx([native["eval_loss"]] * 2, abs=1e-5)


def host_memory(rank, world, tiny, folder, config):
    """Return the growth of this process at its peak and the size of its shard, in MiB.

    Runs on every rank.
    """
    # Imports and connections happen once and do not count.
    plait.initialize(plait.from_pretrained(tiny), config).close()

    def status(name):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(name)) / 1024

    # The kernel resets the peak of this process.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = status("VmRSS:")
    engine = plait.initialize(plait.from_pretrained(folder), config)
    growth = status("VmHWM:") - before
    shard_bytes = sum(local_tensor(p.detach()).nbytes for p in engine.module.parameters())
    engine.close()
    return growth, shard_bytes / MIB


@pytest.mark.proof
@pytest.mark.parametrize(
    ("world", "layers", "layout"),
    [
        pytest.param(4, 6, zero(3), id="4-processes"),
        pytest.param(4, 18, zero(3), id="3-times-the-model"),
        pytest.param(2, 6, zero(3), id="2-processes"),
        pytest.param(4, 6, {"parallel": {"tp": 4}}, id="tp4"),
    ],
)
def test_no_process_loads_the_full_model(pool, tmp_path, world, layers, layout):
    """Loading adds at most a shard, one tensor and 64 MiB to a process.

    So much of a file is mapped at once, and half of it is copied to memory that ranks share before
    its first part is released. Measured: 23 to 40 MiB besides the shard, of 424 and of 1144 MiB of
    weights.
    """
    tiny = str(tmp_path / "tiny")
    large = str(tmp_path / "large")
    save(tiny)
    model = trainers.model(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, vocab_size=8192
    )
    sizes = [parameter.nbytes / MIB for parameter in model.parameters()]
    model.save_pretrained(large, max_shard_size="100MB")
    del model
    for growth, shard in pool.run(world, host_memory, tiny, large, CONFIG | layout):
        assert sum(sizes) / world <= shard + 1 and shard < 1.2 * sum(sizes) / world
        assert shard / 2 < growth < shard + max(sizes) + 64, (growth, shard, max(sizes))


def weights_and_biases(model):
    """Return the weights, and the biases that correct the scores of experts, in float32."""
    tensors = full_weights(model)
    for name, buffer in model.named_buffers():
        if name.endswith(SCORE_CORRECTION_BIAS):
            tensors[name] = buffer
    return {name: tensor.float() for name, tensor in tensors.items()}


def loaded_experts(rank, world, folder):
    """Load a folder with experts on different ranks, per ZeRO stage. Runs on every rank."""
    tensors = []
    for stage in (0, 1, 3):
        config = CONFIG | zero(stage) | {"parallel": {"ep": 2}}
        model = plait.initialize(plait.from_pretrained(folder, use_cache=False), config).model
        tensors.append(weights_and_biases(model))
    return tensors


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name == "mixtral" else [pytest.mark.proof])
        for name in experts.SIZES
    ],
)
def test_each_rank_reads_its_experts(pool, tmp_path, family):
    """Released folders have one tensor per expert, except those of GPT-OSS."""
    model = experts.build(experts.Case(family), dtype=torch.bfloat16)  # type: ignore[arg-type]
    for name, buffer in model.named_buffers():
        if name.endswith(SCORE_CORRECTION_BIAS):
            buffer.uniform_()
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # type: ignore[operator]
    expected = weights_and_biases(model)

    names: list[str] = []
    for file in tmp_path.glob("*.safetensors"):
        names += safe_open(file, "pt").keys()
    assert ".experts.1." in " ".join(names) or family == "gpt_oss"

    for stages in pool.run(2, loaded_experts, str(tmp_path)):
        for tensors in stages:
            assert_equal(tensors, expected)


def test_models_that_are_built(tmp_path):
    save(tmp_path)
    model: Any = plait.from_pretrained(tmp_path, dtype=torch.bfloat16, use_cache=False)
    assert model.dtype == torch.bfloat16 and model.training
    assert not model.config.use_cache and model.generation_config.max_length == 7
    assert weights_of(model) == tmp_path

    with pytest.raises(InputError, match="part of another model"):
        weights_of(torch.nn.Sequential(model, torch.nn.Linear(2, 2)))
    with pytest.raises(InputError, match="no such field"):
        plait.from_pretrained(tmp_path, hiden_size=3)
    with pytest.raises(InputError, match="no such folder"):
        plait.from_pretrained(tmp_path / "none")

    # The folder has no classification head, so one must be initialised in full.
    with pytest.warns(UserWarning, match="in full in every process"):
        classifier: Any = plait.from_pretrained(
            tmp_path, model_class=AutoModelForSequenceClassification, num_labels=3
        )
    assert not is_meta(classifier) and weights_of(classifier) is None
    assert classifier.score.out_features == 3
