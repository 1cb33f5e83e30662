"""`report_to` and `push_to_hub`: only the first process reports, and it pushes full models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from safetensors.torch import load_file

from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.full_tensors import assert_equal, names_of_differences
from tests.parity.trainers import zero

LOGGED = ("loss", "grad_norm", "learning_rate")
PP2, TP2 = {"parallel": {"pp": 2}}, {"parallel": {"tp": 2}}


def train_with_a_tracker(rank, world, config, folder):
    """Return the (step, values) that a tracker receives. Runs on every rank."""
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
    """In a pipeline the loss is on the last stage."""
    expected = trainers.native(dp)
    first, second = pool.run(2, train_with_a_tracker, config, str(tmp_path))
    assert second == []
    assert [step for step, _ in first] == list(range(1, len(expected["loss"]) + 1))
    for key in LOGGED:
        assert [values[key] for _, values in first] == pytest.approx(expected[key], rel=1e-5)


def train_and_push(rank, world, config, folder):
    """Return the (message, weights, file names) of each push, in order. Runs on every rank."""
    pushes = []

    def upload(self, *, folder_path, commit_message, **others):
        assert others["repo_id"] == "me/tiny" and others["revision"] == "draft"
        path = Path(folder_path)
        # The file is written again, so its tensors are copied.
        tensors = load_file(path / "model.safetensors")
        weights = {name: tensor.clone() for name, tensor in tensors.items()}
        pushes.append((commit_message, weights, {file.name for file in path.iterdir()}))
        return SimpleNamespace(done=lambda: True, is_done=lambda: True)

    create = mock.Mock(return_value=SimpleNamespace(repo_id="me/tiny"))
    settings = {
        "push_to_hub": True,
        "hub_model_id": "me/tiny",
        "hub_revision": "draft",
        "hub_always_push": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 2,
        "gradient_accumulation_steps": 1,
    }
    with (
        trainers.launched(rank, world),
        mock.patch("huggingface_hub.HfApi.create_repo", create),
        mock.patch("huggingface_hub.HfApi.upload_folder", upload),
    ):
        trainer = trainers.trainer_of(folder, config, **settings)
        trainer.train()
        trainer.save_model()
        trainer.push_to_hub()
    assert create.call_count == (1 if rank == 0 else 0)
    return pushes


@pytest.mark.parametrize(
    "config", proof_after(1, [zero(3), PP2, TP2], name=lambda config: str([*config.values()]))
)
def test_the_first_process_pushes_the_full_model(pool, tmp_path, config):
    from transformers import AutoModelForCausalLM

    pushes, pushes_of_the_second = pool.run(2, train_and_push, config, str(tmp_path))
    assert pushes_of_the_second == []
    assert [message for message, _, _ in pushes] == [
        "Training in progress, step 1",
        "Training in progress, step 2",
        "Model save",
        "End of training",
    ]
    shapes = {name: tensor.shape for name, tensor in trainers.model().state_dict().items()}
    for _, weights, files in pushes:
        assert {name: tensor.shape for name, tensor in weights.items()} == shapes
        assert {"config.json", "training_args.bin"} <= files

    first, second, _, last = (weights for _, weights, _ in pushes)
    assert names_of_differences(first, second), "nothing was learned"
    assert_equal(second, last)
    assert "README.md" in pushes[-1][2]
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), last)
