"""`report_to` and `push_to_hub`: the first process alone reports, what a run in one process does, and pushes folders of the whole model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.trainers import zero

LOGGED = ("loss", "grad_norm", "learning_rate")
PP2, TP2 = {"parallel": {"pp": 2}}, {"parallel": {"tp": 2}}


def reported(rank, world, config, folder):
    """(step, what was logged) that a tracker was given. Runs in a worker."""
    with trainers.launched(rank, world):
        from transformers import TrainerCallback
        from transformers.integrations import integration_utils

        rows: list[tuple[int, dict[str, float]]] = []

        class Tracker(TrainerCallback):  # type: ignore[misc]
            def on_log(self, args, state, *_, logs, **others):
                if state.is_world_process_zero and "loss" in logs:
                    rows.append((state.global_step, {key: float(logs[key]) for key in LOGGED}))

        with mock.patch.dict(integration_utils.INTEGRATION_TO_CALLBACK, {"tracker": Tracker}):
            trainers.trainer_of(folder, config, report_to=["tracker"]).train()
        return rows


@pytest.mark.parametrize(
    ("dp", "config"), proof_after(1, [(2, zero(3)), (1, PP2)], name=lambda dp, _: f"dp{dp}")
)
def test_the_first_process_reports_what_one_process_does(pool, tmp_path, dp, config):
    """In a pipeline too, whose last stage has the loss."""
    wanted = trainers.native(dp)
    first, second = pool.run(2, reported, config, str(tmp_path))
    assert second == [] and [step for step, _ in first] == list(range(1, len(wanted["loss"]) + 1))
    for key in LOGGED:
        assert [row[key] for _, row in first] == pytest.approx(wanted[key], rel=1e-5)


Pushed = list[tuple[str, dict[str, torch.Tensor], list[str]]]


def pushed(rank, world, config, folder):
    """What the hub is sent: (message, weights, names of files), in the order of time. Runs in a worker."""
    sent: Pushed = []

    def upload(self, *, folder_path, commit_message, **others):
        assert others["repo_id"] == "me/tiny" and others["revision"] == "draft"
        path = Path(folder_path)
        # Copies, because the file is written again.
        weights = {k: v.clone() for k, v in load_file(path / "model.safetensors").items()}
        sent.append((commit_message, weights, sorted(file.name for file in path.iterdir())))
        return SimpleNamespace(done=lambda: True, is_done=lambda: True)

    create = mock.Mock(return_value=SimpleNamespace(repo_id="me/tiny"))
    hub = {"hub_model_id": "me/tiny", "hub_revision": "draft", "hub_always_push": True}
    steps = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    with (
        trainers.launched(rank, world),
        mock.patch("huggingface_hub.HfApi.create_repo", create),
        mock.patch("huggingface_hub.HfApi.upload_folder", upload),
    ):
        trainer = trainers.trainer_of(
            folder, config, push_to_hub=True, gradient_accumulation_steps=1, **hub, **steps
        )
        trainer.train()
        trainer.save_model()
        trainer.push_to_hub()
    assert create.call_count == (1 if rank == 0 else 0)
    return sent


@pytest.mark.parametrize(
    "config", proof_after(1, [zero(3), PP2, TP2], name=lambda config: str([*config.values()]))
)
def test_the_first_process_pushes_the_whole_model(pool, tmp_path, config):
    from transformers import AutoModelForCausalLM

    sent, other = pool.run(2, pushed, config, str(tmp_path))
    assert other == []
    progress = [f"Training in progress, step {step}" for step in (1, 2)]
    assert [message for message, _, _ in sent] == [*progress, "Model save", "End of training"]
    shapes = {name: tensor.shape for name, tensor in trainers.model().state_dict().items()}
    for _, weights, names in sent:
        assert {name: tensor.shape for name, tensor in weights.items()} == shapes
        assert {"config.json", "training_args.bin"} <= set(names)
    first, second, last = sent[0][1], sent[1][1], sent[3][1]
    assert any(not torch.equal(first[name], second[name]) for name in first), "learned nothing"
    assert all(torch.equal(second[name], last[name]) for name in last) and "README.md" in sent[3][2]
    opened = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(opened[name], tensor) for name, tensor in last.items())
