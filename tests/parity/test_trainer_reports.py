"""`report_to` and `push_to_hub`: only the first process reports, and it pushes full models."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from safetensors.torch import load_file

from tests.covers import proof_after
from tests.parity import trainers
from tests.parity.full_tensors import assert_equal, names_of_differences, shapes_of
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
    """A pipeline has the loss on the last stage."""
    expected = trainers.native(dp)
    rows, rows_of_the_second = pool.run(2, train_with_a_tracker, config, str(tmp_path))
    assert rows_of_the_second == []
    assert len(rows) == len(expected["loss"])
    for index, (step, values) in enumerate(rows):
        assert step == index + 1
        for key in LOGGED:
            assert values[key] == pytest.approx(expected[key][index], rel=1e-5), (step, key)


def train_and_push(rank, world, config, folder):
    """Return the (message, weights, file names) of each push, in order. Runs on every rank."""
    pushes = []

    def upload(self, *, folder_path, commit_message, **others):
        assert others["repo_id"] == "me/tiny" and others["revision"] == "draft"
        path = Path(folder_path)
        # The file is written again, so its tensors are copied.
        weights = copy.deepcopy(load_file(path / "model.safetensors"))
        pushes.append((commit_message, weights, set(os.listdir(path))))
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
    messages, weights, files = zip(*pushes, strict=True)
    assert messages == (
        "Training in progress, step 1",
        "Training in progress, step 2",
        "Model save",
        "End of training",
    )
    for of_push, names in zip(weights, files, strict=True):
        assert shapes_of(of_push) == shapes_of(trainers.model().state_dict())
        assert {"config.json", "training_args.bin"} <= names

    first, second, _, last = weights
    assert names_of_differences(first, second), "nothing was learned"
    assert_equal(second, last)
    assert "README.md" in files[-1]
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), last)
