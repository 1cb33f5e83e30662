"""`plait.compat.deepspeed` in one process: refused calls, and names that scripts import."""

import argparse
import itertools
import re

import pytest
import torch
from torch import nn

import plait.compat.deepspeed as deepspeed
from plait.compat.deepspeed import comm
from plait.compat.deepspeed.accelerator import get_accelerator
from plait.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from plait.compat.deepspeed.refused import METHODS, missing

# The public function, initialize, starts processes after these steps.
from plait.compat.deepspeed.start import (
    _drop_last,
    _resolve_config,
    _select_config,
    _set_local_rank,
)
from plait.compat.deepspeed.utils import RepeatingLoader, log_dist
from plait.compat.deepspeed.zero import refuse_lost_writes
from plait.errors import ConfigError, InputError
from tests.parity.trainers import launched

MODEL = nn.Linear(2, 2)
CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {}}}


REFUSED = {
    deepspeed.initialize: [
        ({"model": MODEL, "config": CONFIG, "mpu": object()}, '"parallel": {"tp": 2}'),
        ({"model": MODEL, "config": CONFIG, "mesh_param": (1, 1)}, "mesh_param"),
        ({"model": MODEL, "config": CONFIG, "distributed_port": 29501}, "MASTER_PORT"),
        ({"model": MODEL, "config": CONFIG, "dist_init_required": False}, "there is none"),
        ({"config": CONFIG}, "not NoneType"),
        ({"model": MODEL}, "needs a configuration"),
        ({"model": deepspeed.PipelineModule([MODEL]), "config": CONFIG}, "loss_fn"),
    ],
    deepspeed.PipelineModule: [
        ({"layers": [MODEL], "partition_method": "random"}, "predicted time"),
        ({"layers": [MODEL], "activation_checkpoint_interval": 2}, "use 1"),
        ({"layers": [MODEL], "topology": object()}, "topology"),
    ],
    deepspeed.init_distributed: [
        ({"rank": 3}, "rank is 0 here"),
        ({"dist_backend": "mpi"}, "these devices use"),
        ({"auto_mpi_discovery": False}, "launcher"),
    ],
    deepspeed.zero.Init: [({"remote_device": "cpu"}, "remote_device")],
    deepspeed.utils.safe_get_full_fp32_param: [({"param": MODEL.weight}, "engine.module")],
    deepspeed.init_inference: [
        ({"model": MODEL, "checkpoint": "folder"}, "plait.from_pretrained"),
        ({"model": MODEL, "config": {"quant": {"enabled": True}}}, "TorchAoConfig"),
        ({"model": MODEL, "dtype": torch.int8}, "quantise with Transformers"),
        ({"model": MODEL, "tensor_parallel": {"tp_size": 0}}, "at least 1"),
        ({"model": MODEL, "mp_size": 2, "tensor_parallel": {"tp_size": 4}}, "differ"),
        ({"model": MODEL, "config": "nowhere.json"}, "cannot be read as JSON"),
        ({"model": MODEL, "max_tokns": 3}, "leave it out"),
    ],
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_refused(function):
    for arguments, message in REFUSED[function]:
        with pytest.raises(InputError, match=re.escape(message)):
            function(**arguments)


@pytest.mark.parametrize("method", ["uniform", "type:transformer"])
def test_partition_methods_are_ignored_with_a_warning(method):
    with pytest.warns(UserWarning, match="changes nothing: stages are balanced by predicted time"):
        deepspeed.PipelineModule([MODEL], partition_method=method)


def test_missing_and_misspelt_keys_are_refused():
    """DeepSpeed would ignore the misspelt key and clip at 1.0."""
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu"):
        deepspeed.initialize(model=MODEL, config={"optimizer": CONFIG["optimizer"]})
    with pytest.raises(ConfigError, match="did you mean gradient_clipping"):
        deepspeed.initialize(model=MODEL, config=CONFIG | {"gradient_cliping": 0.3})


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_axes_that_need_train_batch_are_refused(axis):
    config = {**CONFIG, "train_batch_size": 2, "parallel": {axis: 2}}
    with pytest.raises(ConfigError, match=rf"parallel\.{axis}.*engine.train_batch"), launched(0, 2):
        deepspeed.initialize(model=MODEL, config=config)


def test_sources_of_the_configuration():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert args.deepspeed is True
    assert _select_config(args, None, None) == "ds.json"
    assert _select_config(parser.parse_args([]), {"a": 1}, {"b": 2}) == {"a": 1}
    assert _select_config(None, None, {"b": 2}) == {"b": 2}
    for config, params in (({}, None), (None, {})):
        with pytest.raises(InputError, match="leave one of them out"):
            _select_config(args, config, params)


def test_missing_names():
    """`hasattr` returns False, and the error names the replacement."""
    assert not hasattr(deepspeed, "moe")
    assert not hasattr(deepspeed, "whatever")
    error = missing("engine", "to", METHODS)
    assert isinstance(error, AttributeError)
    assert isinstance(error, InputError)
    assert "engine.device" in str(error)


def test_gathered_parameters_without_an_engine():
    with deepspeed.zero.GatheredParameters(MODEL.weight, modifier_rank=0):
        MODEL.weight.detach().fill_(3.0)
    assert MODEL.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


class SmallGPT(nn.Module):
    """Model that initialises its weights as nanoGPT does."""

    def __init__(self, config=None, *, scaled=False):
        super().__init__()
        if config is not None:
            self.config = config
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4)
        self.apply(self._init_weights)
        if scaled:
            self.head.weight.data *= 0.5

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def test_writes_of_a_constructor_under_zero_init_are_refused():
    """Weights on meta are drawn later, by methods that can run again. A constructor cannot."""
    with deepspeed.zero.Init():
        configured = SmallGPT(config={})
        plain = SmallGPT()
        scaled = SmallGPT(config={}, scaled=True)
    refuse_lost_writes(configured)
    refuse_lost_writes(plain)
    message = r"head.weight is set by (__imul__|data) in SmallGPT.__init__"
    with pytest.raises(InputError, match=message):
        refuse_lost_writes(scaled)
    with deepspeed.zero.Init(enabled=False):
        refuse_lost_writes(SmallGPT())
    with deepspeed.zero.Init(), pytest.raises(InputError, match="inside zero.Init"):
        deepspeed.initialize(model=plain, config=CONFIG)


def test_arguments_of_scripts():
    args = argparse.Namespace(local_rank=-1)
    _set_local_rank(args)
    assert args.local_rank == 0
    with pytest.raises(InputError, match="the launcher set 0"):
        _set_local_rank(argparse.Namespace(local_rank=3))
    assert _drop_last({"dataloader_drop_last": True})
    assert not _drop_last({})


def test_a_pipeline_module_changes_the_configuration():
    module = deepspeed.PipelineModule([MODEL], num_stages=1, activation_checkpoint_interval=1)
    resolved = _resolve_config(CONFIG, module)
    assert resolved.layout.pp == 1
    assert resolved.recompute.mode == "full"


def test_accelerator_and_comm():
    assert comm.get_local_rank() == 0
    assert not comm.is_initialized()
    assert get_accelerator() is deepspeed.get_accelerator()
    assert torch.device(get_accelerator().device_name(0)).type == get_accelerator().device_name()
    with pytest.raises(InputError, match="torch.Stream"):
        get_accelerator().Stream()


def test_optimizers():
    assert type(FusedAdam(MODEL.parameters(), lr=0.5)) is torch.optim.AdamW
    adam = DeepSpeedCPUAdam(MODEL.parameters(), adamw_mode=False, weight_decay=0.1)
    assert type(adam) is torch.optim.Adam
    assert adam.param_groups[0]["weight_decay"] == 0.1
    with pytest.raises(InputError, match="amsgrad"):
        FusedAdam(MODEL.parameters(), amsgrad=True)


def test_utilities():
    assert list(itertools.islice(RepeatingLoader([1, 2]), 5)) == [1, 2, 1, 2, 1]
    log_dist("loss 3", ranks=[0])
    with pytest.raises(InputError, match="safe_get_full_grad"):
        deepspeed.utils.safe_update_full_grad_vectorized()
