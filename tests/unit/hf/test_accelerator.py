"""Requests that `plait.hf.Accelerator` refuses, in one process without a launcher."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from accelerate import DataLoaderConfiguration
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
)
from torch import nn

from plait.cluster.mesh import DEFAULT_TIMEOUT
from plait.errors import ConfigError, InputError
from plait.hf import Accelerator, TrainingArguments
from plait.hf import accelerator as accelerator_module
from tests.parity.trainers import launched_alone


@pytest.fixture(autouse=True)
def _one_process():
    environment = dict(os.environ)
    with launched_alone():
        yield
    os.environ.clear()
    os.environ.update(environment)


DISPATCHED = DataLoaderConfiguration(dispatch_batches=True)
UNEVEN = DataLoaderConfiguration(even_batches=False)
NAMED_CHECKPOINTS = ProjectConfiguration(automatic_checkpoint_naming=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split_batches": True}, "batch size of a rank"),
        ({"rng_types": ["torch"]}, "rng_types"),
        ({"mixed_precision": "fp8"}, "no, bf16, fp16"),
        ({"kwargs_handlers": [GradScalerKwargs(init_scale=4.0)]}, '"fp16"'),
        ({"plait_config": {}, "deepspeed_plugin": object()}, "leave one of them out"),
        ({"dataloader_config": DISPATCHED}, "dispatch_batches=True"),
        ({"dataloader_config": UNEVEN}, "every sample is used once"),
        ({"project_config": NAMED_CHECKPOINTS}, "save_state(folder)"),
    ],
)
def test_unsupported_arguments_are_refused(arguments, message):
    with pytest.raises(InputError) as error:
        Accelerator(cpu=True, **arguments)
    assert message in str(error.value)


def test_batches_that_are_not_dispatched_are_supported():
    """Every process reads its own batches."""
    Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))


def test_plugins_of_other_layouts_are_refused(monkeypatch):
    with pytest.raises(InputError, match='"stage": 3'):
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match="ACCELERATE_USE_FSDP"):
        Accelerator(cpu=True)


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}


@pytest.mark.parametrize(
    ("config", "arguments", "field"),
    [
        ({"bf16": {"enabled": True}}, {"mixed_precision": "fp16"}, "bf16.enabled"),
        ({"scheduler": WARMUP}, {}, "scheduler"),
        ({"parallel": {"loss_chunk_tokens": 8}}, {}, "parallel.loss_chunk_tokens"),
        ({"experts": {"z_loss": 0.1}}, {}, "experts.z_loss"),
    ],
)
def test_a_contradicting_configuration_is_refused(config, arguments, field):
    with pytest.raises(ConfigError) as error:
        Accelerator(cpu=True, plait_config=config, **arguments)
    assert field in {problem.field for problem in error.value.problems}


@pytest.mark.parametrize("axis", ["pp", "cp", "ep"])
def test_layouts_without_a_loss_to_call_are_refused(monkeypatch, axis):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    # The Trainer does not split sequences either.
    remedy = r"engine\.train_batch" if axis == "cp" else r"plait\.hf\.Trainer"
    with pytest.raises(ConfigError, match=rf"parallel\.{axis}.*{remedy}") as error:
        Accelerator(cpu=True, plait_config={"parallel": {axis: 2}})
    assert ("plait.hf.Trainer" in str(error.value)) == (axis != "cp")


def test_a_deepspeed_plugin_is_read_without_deepspeed():
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=3)
    options = {"gradient_accumulation_steps": 3, "mixed_precision": "bf16"}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, **options)
    resolved = accelerator.resolved
    assert (resolved.data_parallel.stage, resolved.batch.accumulation) == (2, 3)
    assert resolved.precision.compute == "bfloat16" and accelerator.mixed_precision == "bf16"


def test_prepare_needs_one_model_and_one_optimizer():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="of 0 of the models"):
        accelerator.prepare(optimizer)
    with pytest.raises(InputError, match="one model with one optimizer"):
        accelerator.prepare(model, optimizer, torch.optim.SGD(model.parameters(), lr=0.1))
    for call, argument in (
        (accelerator.prepare_model, model),
        (accelerator.prepare_optimizer, optimizer),
    ):
        with pytest.raises(InputError, match=r"accelerator\.prepare\(model, optimizer"):
            call(argument)
    with pytest.raises(InputError, match="no model is trained yet"):
        accelerator.backward(torch.zeros(()))


def test_calls_at_the_wrong_time_are_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    weight = model[0].weight

    # The first micro-batch updates nothing.
    with accelerator.accumulate(model):
        loss = model(torch.ones(1, 2)).sum()
        with pytest.raises(InputError, match=r"retain_graph=\).*add them up and call"):
            accelerator.backward(loss, retain_graph=True)
        accelerator.backward(loss)
        before = weight.clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(before, weight) and weight.grad is not None
        with pytest.raises(InputError, match="if accelerator.sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)

    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        with pytest.raises(InputError, match="Euclidean"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
        with pytest.raises(InputError, match="clip_grad_norm_"):
            accelerator.clip_grad_value_(model.parameters(), 1.0)
        with pytest.raises(InputError, match="clip_grad_norm_"):
            accelerator.unscale_gradients()
        with pytest.warns(UserWarning, match="drops the gradients of 2 micro-batches"):
            optimizer.zero_grad()
        assert weight.grad is None

    with pytest.raises(InputError, match=r"accelerator\.load_state"):
        optimizer.load_state_dict({})
    with pytest.raises(InputError, match="not needed"):
        accelerator.join_uneven_inputs([model])
    accelerator.free_memory()


def test_the_norm_of_the_configuration_is_used():
    accelerator = Accelerator(cpu=True, plait_config={"gradient_clipping": 0.3})
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigError, match="gradient_clipping"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    # A second call does not clip again.
    for _ in range(2):
        assert float(accelerator.clip_grad_norm_(model.parameters(), 0.3)) == pytest.approx(3**0.5)

    before = model.weight.detach().clone()
    optimizer.step()
    change = float((model.weight.detach() - before).norm())
    # All three gradients are 1, and two of them are the weight's.
    assert change == pytest.approx(0.1 * 0.3 * (2 / 3) ** 0.5, rel=1e-4)
    accelerator.free_memory()


def test_an_ended_process_group_is_created_by_plait(monkeypatch, tmp_path):
    """Accelerate would read addresses of the ended group in the launcher's store."""
    timeouts = []
    monkeypatch.setattr(accelerator_module, "join", lambda *, timeout: timeouts.append(timeout))
    monkeypatch.setattr(accelerator_module, "is_initialized", lambda: True)
    for processes, expected in ((1, []), (2, [DEFAULT_TIMEOUT, timedelta(seconds=7)])):
        state = SimpleNamespace(num_processes=processes)
        monkeypatch.setattr(accelerator_module, "PartialState", lambda state=state: state)
        Accelerator(cpu=True)
        TrainingArguments(str(tmp_path), use_cpu=True, ddp_timeout=7)
        accelerator_module.rejoin("mpi", timeout=DEFAULT_TIMEOUT)
        assert timeouts == expected
