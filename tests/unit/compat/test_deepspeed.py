"""What `plait.compat.deepspeed` refuses, in one process and without a group."""

import argparse
import itertools

import pytest
import torch
from torch import nn

import plait.compat.deepspeed as deepspeed
from plait.compat.deepspeed.refused import METHODS, missing
from plait.compat.deepspeed.start import (
    _drop_last,
    _resolve_config,
    _select_config,
    _set_local_rank,
)
from plait.compat.deepspeed.zero import refuse_lost_writes
from plait.errors import ConfigError, InputError
from tests.parity.trainers import launched

MODEL = nn.Linear(2, 2)
CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {}}}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: deepspeed.initialize(model=MODEL, config=CONFIG, mpu=object()), '"parallel": {"tp": 2}'),
        (lambda: deepspeed.initialize(model=MODEL, config=CONFIG, mesh_param=(1, 1)), "mesh_param"),
        (lambda: deepspeed.initialize(model=MODEL, config=CONFIG, distributed_port=29501), "MASTER_PORT"),
        (lambda: deepspeed.initialize(model=MODEL, config=CONFIG, dist_init_required=False), "there is none"),
        (lambda: deepspeed.initialize(config=CONFIG), "not NoneType"),
        (lambda: deepspeed.initialize(model=MODEL), "needs a configuration"),
        (lambda: deepspeed.initialize(model=deepspeed.PipelineModule([MODEL]), config=CONFIG), "loss_fn"),
        (lambda: deepspeed.PipelineModule([MODEL], partition_method="random"), "predicted time"),
        (lambda: deepspeed.PipelineModule([MODEL], activation_checkpoint_interval=2), "use 1"),
        (lambda: deepspeed.PipelineModule([MODEL], topology=object()), "topology"),
        (lambda: deepspeed.init_distributed(rank=3), "rank is 0 here"),
        (lambda: deepspeed.init_distributed("mpi"), "these devices use"),
        (lambda: deepspeed.init_distributed(auto_mpi_discovery=False), "launcher"),
        (lambda: deepspeed.zero.Init(remote_device="cpu"), "remote_device"),
        (lambda: deepspeed.utils.safe_get_full_fp32_param(MODEL.weight), "engine.module"),
        (lambda: deepspeed.init_inference(MODEL, checkpoint="folder"), "plait.from_pretrained"),
        (lambda: deepspeed.init_inference(MODEL, {"quant": {"enabled": True}}), "TorchAoConfig"),
        (lambda: deepspeed.init_inference(MODEL, dtype=torch.int8), "quantise with Transformers"),
        (lambda: deepspeed.init_inference(MODEL, tensor_parallel={"tp_size": 0}), "at least 1"),
        (lambda: deepspeed.init_inference(MODEL, mp_size=2, tensor_parallel={"tp_size": 4}), "differ"),
        (lambda: deepspeed.init_inference(MODEL, "nowhere.json"), "cannot be read as JSON"),
        (lambda: deepspeed.init_inference(MODEL, max_tokns=3), "leave it out"),
    ],
)  # fmt: skip
def test_refused(call, words):
    with pytest.raises(InputError) as error:
        call()
    assert words in str(error.value)


@pytest.mark.parametrize("method", ["uniform", "type:transformer"])
def test_where_stages_are_cut_changes_no_number(method):
    with pytest.warns(UserWarning, match="changes nothing: stages are balanced by predicted time"):
        deepspeed.PipelineModule([MODEL], partition_method=method)


def test_no_batch_size_and_unknown_keys():
    """DeepSpeed ignores the misspelt key and clips at 1.0."""
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu"):
        deepspeed.initialize(model=MODEL, config={"optimizer": CONFIG["optimizer"]})
    with pytest.raises(ConfigError, match="did you mean gradient_clipping"):
        deepspeed.initialize(model=MODEL, config=CONFIG | {"gradient_cliping": 0.3})


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_parts_of_sequences_and_experts(axis):
    """The refusal comes before the first forward, whose error would name calls that this engine does not have."""
    config = {**CONFIG, "train_batch_size": 2, "parallel": {axis: 2}}
    with pytest.raises(ConfigError, match=rf"parallel\.{axis}.*engine.train_batch"), launched(0, 2):
        deepspeed.initialize(model=MODEL, config=config)


def test_which_configuration():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert args.deepspeed is True and _select_config(args, None, None) == "ds.json"
    assert _select_config(parser.parse_args([]), {"a": 1}, {"b": 2}) == {"a": 1}
    assert _select_config(None, None, {"b": 2}) == {"b": 2}
    for config, params in (({}, None), (None, {})):
        with pytest.raises(InputError, match="leave one of them out"):
            _select_config(args, config, params)


def test_missing_names():
    """`hasattr` answers, and the error says what to use."""
    assert not hasattr(deepspeed, "moe") and not hasattr(deepspeed, "whatever")
    error = missing("engine", "to", METHODS)
    assert isinstance(error, AttributeError) and isinstance(error, InputError)
    assert "engine.device" in str(error)


def test_parameters_without_an_engine_are_left_alone():
    with deepspeed.zero.GatheredParameters(MODEL.weight, modifier_rank=0):
        MODEL.weight.detach().fill_(3.0)
    assert MODEL.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]


class Gpt(nn.Module):
    """In the style of nanoGPT."""

    def __init__(self, config=None, *, scaled=False):
        super().__init__()
        if config is not None:
            self.config = config
        self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4)
        self.apply(self._init_weights)
        if scaled:
            self.head.weight.data *= 0.5

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def test_what_a_constructor_sets_is_not_lost_under_zero_init():
    """Weights on meta are drawn later, by methods that run again. Writes that happen only in a constructor are refused."""
    with deepspeed.zero.Init():
        repeated, alone, scaled = Gpt(config={}), Gpt(), Gpt(config={}, scaled=True)
    refuse_lost_writes(repeated)
    refuse_lost_writes(alone)
    with pytest.raises(InputError, match=r"head.weight is set by (__imul__|data) in Gpt.__init__"):
        refuse_lost_writes(scaled)
    with deepspeed.zero.Init(enabled=False):
        refuse_lost_writes(Gpt())
    with deepspeed.zero.Init(), pytest.raises(InputError, match="inside zero.Init"):
        deepspeed.initialize(model=alone, config=CONFIG)


def test_arguments_of_scripts():
    args = argparse.Namespace(local_rank=-1)
    _set_local_rank(args)
    assert args.local_rank == 0
    with pytest.raises(InputError, match="the launcher set 0"):
        _set_local_rank(argparse.Namespace(local_rank=3))
    assert _drop_last({"dataloader_drop_last": True}) and not _drop_last({})


def test_a_pipeline_module_changes_the_configuration():
    module = deepspeed.PipelineModule([MODEL], num_stages=1, activation_checkpoint_interval=1)
    resolved = _resolve_config(CONFIG, module)
    assert (resolved.layout.pp, resolved.recompute.mode) == (1, "full")


def test_what_scripts_import():
    from plait.compat.deepspeed import comm
    from plait.compat.deepspeed.accelerator import get_accelerator
    from plait.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from plait.compat.deepspeed.utils import RepeatingLoader, log_dist

    assert comm.get_local_rank() == 0 and not comm.is_initialized()
    assert get_accelerator() is deepspeed.get_accelerator()
    assert torch.device(get_accelerator().device_name(0)).type == get_accelerator().device_name()
    with pytest.raises(InputError, match="torch.Stream"):
        get_accelerator().Stream()
    assert type(FusedAdam(MODEL.parameters(), lr=0.5)) is torch.optim.AdamW
    made = DeepSpeedCPUAdam(MODEL.parameters(), adamw_mode=False, weight_decay=0.1)
    assert type(made) is torch.optim.Adam and made.param_groups[0]["weight_decay"] == 0.1
    with pytest.raises(InputError, match="amsgrad"):
        FusedAdam(MODEL.parameters(), amsgrad=True)
    assert list(itertools.islice(RepeatingLoader([1, 2]), 5)) == [1, 2, 1, 2, 1]
    log_dist("loss 3", ranks=[0])
    with pytest.raises(InputError, match="safe_get_full_grad"):
        deepspeed.utils.safe_update_full_grad_vectorized()
