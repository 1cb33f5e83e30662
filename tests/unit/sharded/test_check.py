"""Checks of a model and a configuration before a process group exists."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from plait.cluster.layout import Layout
from plait.config.resolving.resolve import load, resolve
from plait.errors import ConfigError, ModelError
from plait.model.blocks import find_blocks
from plait.parallel.order import ORDER, UNSUPPORTED_COMBINATIONS, check_all, refuse_incompatible
from plait.parallel.parts import Plans
from plait.parallel.technique import Technique, TechniqueContext
from plait.parallel.techniques.compile import Compile
from plait.parallel.techniques.data_parallel import DataParallel
from plait.sharded.assemble import checked_model

# The public function compares parameters over the ranks of a process group.
from plait.sharded.guard import _can_be_compared
from plait.sharded.misuse import refuse_unfit_layers, warn_of_no_blocks
from tests.parity import cases


def resolved(world_size, **parallel):
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    return resolve(load({**sizes, "parallel": parallel}), world_size=world_size)


class Refusing(Technique):
    """A technique that refuses every model."""

    def check(self, context):
        assert not dist.is_initialized()
        name = type(context.model).__name__
        raise ModelError(f"{name} is not fit for {context.layout.world_size} processes")


def test_a_technique_of_the_user_is_checked():
    with pytest.raises(ModelError, match="Linear is not fit for 2 processes"):
        check_all(TechniqueContext(Layout(dp_shard=2), (Refusing(),), model=nn.Linear(2, 2)))


def test_initialize_refuses_before_a_process_group_exists():
    """A process group would be refused, because there is one process and not two."""
    model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="no repeated blocks"):
        plait.initialize(model, resolved(2, recompute={"mode": "full"}))
    with pytest.raises(ModelError, match="no repeated blocks"):
        plait.parallelize(model, resolved(2, recompute={"mode": "full"}))
    assert not dist.is_initialized()


def test_a_configuration_lists_every_technique_in_order():
    assert tuple(type(technique) for technique in resolved(1).techniques) == ORDER


def test_checks_return_plans():
    """Checks without a model return no plans, and refuse only errors of the file."""
    with torch.device("meta"):
        model = cases.build("llama", tied=False, layers=4)
    plans = checked_model(model, resolved(4, pp=2, tp=2)).parts.plans
    assert plans.tensor is not None
    assert plans.pipeline.schedule.pp == 2
    assert plans.pipeline.staged is None
    assert check_all(resolved(4, pp=2, tp=2).context()) == Plans()
    file = load({"compile": {"enabled": True, "backend": "nonsense"}})
    wrong = resolve(file, world_size=1, micro_batch_size=1)
    with pytest.raises(ConfigError, match=r"compile\.backend"):
        check_all(wrong.context())


def test_all_unsupported_combinations_are_reported_at_once():
    techniques = (Compile(enabled=True), DataParallel(secondary_partition=2))
    context = TechniqueContext(Layout(pp=2, cp=2, tp=2), techniques)
    with pytest.raises(ConfigError) as error:
        refuse_incompatible(context)
    fields = [problem.field for problem in error.value.problems]
    assert fields == [refusal.field for refusal in UNSUPPORTED_COMBINATIONS]


def test_supported_combinations_are_accepted():
    refuse_incompatible(TechniqueContext(Layout(pp=2, dp_replicate=2, dp_shard=2, tp=2)))
    for technique in (DataParallel(secondary_partition=2), Compile(enabled=True)):
        refuse_incompatible(TechniqueContext(Layout(dp_shard=4), (technique,)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_scripted_layers_train_at_stage_0_only():
    """`fully_shard` cannot replace parameters of torch.jit's modules."""
    layers = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    layers[1] = torch.jit.script(layers[1])
    model = nn.Sequential(nn.ModuleList(layers))
    assert find_blocks(model) == ("0.0", "0.1")
    refuse_unfit_layers(model, resolved(2))
    file = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    with pytest.raises(ModelError, match=r"`0.1` is a module of torch.jit.*use ZeRO stage 0"):
        refuse_unfit_layers(model, resolve(load(file), world_size=2))


def test_parameters_in_mapped_files_are_not_compared(tmp_path):
    """A comparison would read all files of an offloaded model into memory."""
    in_memory = nn.Parameter(torch.zeros(4))
    file = tmp_path / "parameters"
    file.write_bytes(bytes(16))
    mapped = torch.from_file(str(file), shared=True, size=4, dtype=torch.float32)
    in_file = nn.Parameter(mapped)
    assert _can_be_compared(in_memory)
    assert not _can_be_compared(in_file)


def test_a_large_model_without_blocks_is_warned_of():
    """ZeRO stage 3 gathers all parameters at the same time if it finds no layers."""
    with torch.device("meta"):
        model = nn.Linear(8192, 8192)
    message = (
        "stage = 3: Linear has no list of repeated layers, so all of its 67,117,056 parameters"
    )
    with pytest.warns(UserWarning, match=message):
        warn_of_no_blocks(model, (), stage=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_no_blocks(model, ("layers.0",), stage=3)
        warn_of_no_blocks(model, (), stage=2)
        warn_of_no_blocks(nn.Linear(8, 8), (), stage=3)
