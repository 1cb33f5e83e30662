"""Requirements of Plait's Trainer on the installed release of Transformers."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import transformers

from plait.errors import InputError
from plait.hf import Trainer, TrainerMixin
from plait.hf.transformers_trainer import OLDEST_TRAINER, loss_is_scaled

OVERRIDDEN = """
    _build_accelerator_args _clip_grad_norm _get_dataloader _get_grad_norm _get_num_items_in_batch
    _get_train_sampler _init_training_state _load_best_model _load_from_checkpoint
    _load_optimizer_and_scheduler _load_rng_state _move_model_to_device _prepare_for_training
    _run_epoch _save_optimizer_and_scheduler _save_rng_state _track_num_input_tokens
"""
"""Private methods of Transformers' Trainer. Nothing would call the override of a renamed one."""


def test_overridden_methods_exist():
    for name in OVERRIDDEN.split():
        assert callable(getattr(transformers.Trainer, name, None)), f"transformers.Trainer.{name}"
        assert getattr(TrainerMixin, name) is not getattr(transformers.Trainer, name)


@pytest.mark.parametrize("installed", ["5.0.0", "5.16.1"])
def test_an_older_trainer_is_refused(installed, monkeypatch):
    monkeypatch.setattr("plait.hf.transformers_trainer.version", lambda name: installed)
    message = rf"Transformers {installed} .*pip install 'transformers>={OLDEST_TRAINER}'"
    with pytest.raises(InputError, match=message):
        Trainer()


def test_an_older_trainer_keeps_its_arguments(monkeypatch):
    """Plait reroutes `deepspeed=` and `fsdp=` only if its Trainer can train."""
    changes: list[str] = []
    monkeypatch.setattr("plait.hf.arguments.patch_transformers", lambda: changes.append("rerouted"))
    with monkeypatch.context() as older:
        older.setattr("plait.hf.transformers_trainer.version", lambda name: "5.16.1")
        import_trainer_again(older)
        assert not changes
    import_trainer_again(monkeypatch)
    assert changes == ["rerouted"]


def import_trainer_again(monkeypatch):
    """Execute plait.hf.trainer, which changes Transformers when it is imported."""
    spec = importlib.util.find_spec("plait.hf.trainer")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their names up in sys.modules.
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)


def test_a_loss_is_divided_once(monkeypatch):
    """The installed release decides. Before 5.19 it reads no `loss_is_scaled_for_ga`."""
    trainer = SimpleNamespace(
        loss_is_scaled_for_ga=None, model_accepts_loss_kwargs=True, compute_loss_func=None
    )
    assert loss_is_scaled(trainer, 3) and not loss_is_scaled(trainer, None)
    trainer.model_accepts_loss_kwargs = False
    assert not loss_is_scaled(trainer, 3)
    trainer.compute_loss_func = max
    assert loss_is_scaled(trainer, None)

    trainer.loss_is_scaled_for_ga = False
    monkeypatch.setattr(transformers.Trainer, "loss_is_scaled_for_ga", None, raising=False)
    assert not loss_is_scaled(trainer, None)
    monkeypatch.delattr(transformers.Trainer, "loss_is_scaled_for_ga")
    assert loss_is_scaled(trainer, None)
