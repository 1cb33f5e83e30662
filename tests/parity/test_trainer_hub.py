"""`push_to_hub`: the first process pushes folders that hold the whole model, on every layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.parity import trainers
from tests.parity.trainers import zero
from tests.pool import Pool

Pushed = list[tuple[str, dict[str, torch.Tensor], list[str]]]


def pushed(rank: int, world: int, config: dict[str, Any], folder: str) -> Pushed:
    """What the hub is sent: (message, weights, names of files), in the order of time. Runs in a worker."""
    sent: Pushed = []

    def upload(self: Any, *, folder_path: str, commit_message: str, **others: Any) -> Any:
        assert others["repo_id"] == "me/tiny" and others["revision"] == "draft"
        path = Path(folder_path)
        weights = {
            name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()
        }  # the file is written again
        sent.append((commit_message, weights, sorted(file.name for file in path.iterdir())))
        return SimpleNamespace(done=lambda: True, is_done=lambda: True)

    create = mock.Mock(return_value=SimpleNamespace(repo_id="me/tiny"))
    with (
        trainers.launched(rank, world),
        mock.patch("huggingface_hub.HfApi.create_repo", create),
        mock.patch("huggingface_hub.HfApi.upload_folder", upload),
    ):
        from plait.hf import Trainer, TrainingArguments

        given: dict[str, Any] = {
            "push_to_hub": True,
            "hub_model_id": "me/tiny",
            "hub_revision": "draft",
            "hub_always_push": True,
        }
        settings = given | {
            "save_strategy": "steps",
            "save_steps": 1,
            "max_steps": 2,
            "gradient_accumulation_steps": 1,
        }
        arguments = trainers.arguments(TrainingArguments, folder, deepspeed=config, **settings)
        trainer = Trainer(model=trainers.model(), args=arguments, train_dataset=trainers.samples())
        trainer.train()
        trainer.save_model()
        trainer.push_to_hub()
    assert create.call_count == (1 if rank == 0 else 0)
    return sent


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(zero(3), id="zero3"),
        pytest.param({"parallel": {"pp": 2}}, id="pp2"),
        pytest.param({"parallel": {"tp": 2}}, id="tp2", marks=pytest.mark.proof),
    ],
)
def test_the_first_process_pushes_the_whole_model(
    pool: Pool, tmp_path: Path, config: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    sent, other = pool.run(2, pushed, config, str(tmp_path))
    assert other == []
    messages = [
        "Training in progress, step 1",
        "Training in progress, step 2",
        "Model save",
        "End of training",
    ]
    assert [message for message, _, _ in sent] == messages
    shapes = {name: tensor.shape for name, tensor in trainers.model().state_dict().items()}
    for _, weights, names in sent:
        assert {name: tensor.shape for name, tensor in weights.items()} == shapes and {
            "config.json",
            "training_args.bin",
        } <= set(names)
    first, second, last = sent[0][1], sent[1][1], sent[3][1]
    assert any(not torch.equal(first[name], second[name]) for name in first), "learned nothing"
    assert all(torch.equal(second[name], last[name]) for name in last) and "README.md" in sent[3][2]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(opened[name], tensor) for name, tensor in last.items())
