"""Optimizers named by a configuration equal torch's, on plain and on sharded parameters."""

import copy
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from plait.config.schema.optimization import OptimizerSpec, SchedulerSpec
from plait.errors import ConfigError, ModelError
from plait.optim.lr_schedules import build_scheduler
from plait.optim.optimizer import JoinedOptimizer, build_optimizer, refuse_nothing_to_train


class Net(nn.Module):
    """An embedding, two matrices with biases, and a head that is not tied."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 20)
        self.down = nn.Linear(20, 8)
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.down(torch.tanh(self.up(self.embed(tokens)))))


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def build(type, params=None, model=None):
    spec = OptimizerSpec(type=type, params=params or {})
    return build_optimizer(spec, (model or net()).named_parameters())


def train(model, optimizer, steps=4, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 11, (2, 6), generator=generator)
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {}
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        values[name] = full.detach().double()
    return values


def assert_equal(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(model, mesh, *, only=None):
    fully_shard(model if only is None else getattr(model, only), mesh=mesh)
    return model


DECAY = {"weight_decay": 0.1}
NO_DECAY = {"weight_decay": 0.0}
ALL_OF_ADAM = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
IGNORED = {"bias_correction": True, "set_grad_none": True, "fp32_optimizer_states": True}
MAXIMIZE = {"amsgrad": True, "maximize": True}
NESTEROV = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
# Name and parameters of the configuration, and torch's class and parameters.
REFERENCES = [
    ("AdamW", {}, torch.optim.AdamW, NO_DECAY),
    ("adamw", {**ALL_OF_ADAM, "betas": [0.8, 0.9]}, torch.optim.AdamW, ALL_OF_ADAM),
    ("Adam", DECAY, torch.optim.AdamW, DECAY),
    ("Adam", {**DECAY, "adam_w_mode": False}, torch.optim.Adam, DECAY),
    ("AdamW", {**DECAY, "adam_w_mode": False}, torch.optim.AdamW, DECAY),
    ("Adam", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
    ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {}),
    ("AdamW", dict.fromkeys(ALL_OF_ADAM, "auto"), torch.optim.AdamW, {"lr": 5e-5, **NO_DECAY}),
    ("AdamW", IGNORED, torch.optim.AdamW, NO_DECAY),
    ("AdamW", MAXIMIZE, torch.optim.AdamW, {**MAXIMIZE, **NO_DECAY}),
    ("SGD", NESTEROV, torch.optim.SGD, NESTEROV),
    ("Adagrad", {"lr": 0.1}, torch.optim.Adagrad, {"lr": 0.1}),
    ("RMSprop", {"momentum": 0.5}, torch.optim.RMSprop, {"momentum": 0.5}),
    ("NAdam", {}, torch.optim.NAdam, {}),
    ("Adafactor", {"lr": 0.1}, torch.optim.Adafactor, {"lr": 0.1}),
    ("torch.optim.AdamW", {"lr": 0.1}, torch.optim.AdamW, {"lr": 0.1}),
]


@pytest.mark.parametrize(("type", "params", "torch_class", "torch_params"), REFERENCES)
def test_equals_torch_with_defaults_of_deepspeed(type, params, torch_class, torch_params):
    model = net()
    optimizer = build(type, params, model)
    assert optimizer.__class__ is torch_class
    plain = net()
    reference = torch_class(plain.parameters(), **torch_params)
    assert_equal(train(model, optimizer), train(plain, reference))


def ids(parameters):
    return [id(parameter) for parameter in parameters]


def test_frozen_parameters_are_excluded_and_tied_ones_unique():
    model = net()
    model.up.requires_grad_(False)
    model.lm_head.weight = model.embed.weight
    named = list(model.named_parameters(remove_duplicate=False))
    [group] = build_optimizer(OptimizerSpec(), named).param_groups
    assert ids(group["params"]) == ids([model.embed.weight, model.down.weight, model.down.bias])


def test_a_model_with_nothing_to_train_is_refused():
    message = "no parameter of the model requires a gradient.*requires_grad_"
    with pytest.raises(ModelError, match=message):
        refuse_nothing_to_train(net().requires_grad_(False))


def test_parameters_without_a_shape_are_refused():
    """The remedy of the message works: the first forward gives them a shape."""
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(2))
    with pytest.raises(ModelError, match="`1.weight` has no shape yet.*call the model once"):
        refuse_nothing_to_train(model)
    model(torch.ones(1, 2))
    refuse_nothing_to_train(model)


@pytest.mark.parametrize("type", ["AdamW", "SGD", "Muon"])
def test_a_pipeline_stage_may_have_nothing_to_train(type):
    optimizer = build(type, model=net().requires_grad_(False))
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}


MOMENTUM = {"SGD": {"momentum": 0.9}}
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("type", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_the_fused_kernel_is_used_unless_it_is_wrong(type, dtype):
    # torch's fused SGD skips most elements of these dtypes on a CPU.
    is_wrong = type == "SGD" and dtype in (torch.bfloat16, torch.float16)
    parameter = nn.Parameter(torch.linspace(-1, 1, 100).to(dtype))
    exact = nn.Parameter(parameter.detach().double())
    params = {"lr": 0.01, **MOMENTUM.get(type, {})}
    optimizer = build_optimizer(OptimizerSpec(type=type, params=params), [("p", parameter)])
    reference = optimizer.__class__([exact], **params, weight_decay=0.0, foreach=False)
    assert bool(optimizer.param_groups[0].get("fused")) is not is_wrong
    for step in range(5):
        grad = torch.cos(torch.arange(100.0) + step)
        parameter.grad = grad.to(dtype)
        exact.grad = grad.double()
        optimizer.step()
        reference.step()
    # Five steps round the parameter five times. The fused SGD would be wrong by 0.1.
    torch.testing.assert_close(parameter.double(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "settings", [{}, {"nesterov": True}, {"dampening": 0.4}, {"maximize": True, "dampening": 0.3}]
)
def test_momentum_of_a_late_gradient(settings):
    """Parameters that miss the first or a later step are updated as by torch's plain SGD."""
    params = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, **settings}
    model = net()
    optimizer = build("SGD", params, model)
    assert optimizer.param_groups[0]["fused"]
    plain = net()
    reference = torch.optim.SGD(plain.parameters(), **params, foreach=False, fused=False)
    used_by_step = (["embed"], ["embed", "up"], ["down"], ["embed", "up", "down", "lm_head"])
    for index, used in enumerate(used_by_step):
        for network, updater in ((model, optimizer), (plain, reference)):
            generator = torch.Generator().manual_seed(index)
            for parameter in network.parameters():
                parameter.grad = None
            for layer in used:
                for parameter in getattr(network, layer).parameters():
                    gradient = torch.randn(parameter.shape, generator=generator)
                    parameter.grad = gradient.double()
            updater.step()
    assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()), 1e-15)


def test_a_requested_kernel_is_used_or_refused():
    assert not build("AdamW", {"fused": False}).param_groups[0]["fused"]
    assert build("AdamW", {"foreach": True}).param_groups[0]["fused"] is None
    message = "optimizer.params.fused = True: .*unchanged on CPU .*191763.*; leave it out"
    with pytest.raises(ConfigError, match=message):
        build("SGD", {"fused": True}, net(torch.bfloat16))


@pytest.mark.parametrize(
    ("type", "params", "fused"),
    [
        ("AdamW", {"weight_decay": 0.1}, True),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, True),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, False),
        ("Adagrad", {}, False),
        ("RMSprop", {}, False),
        ("Muon", {}, False),
    ],
)
def test_shards_are_updated_like_full_parameters(mesh, type, params, fused):
    model = sharded(net(), mesh)
    optimizer = build(type, params, model)
    for group in optimizer.param_groups:
        assert all(isinstance(parameter, DTensor) for parameter in group["params"])
    assert bool(optimizer.param_groups[0].get("fused")) is fused
    plain = net()
    assert_equal(train(model, optimizer), train(plain, build(type, params, plain)))


@pytest.mark.parametrize("type", ["AdamW", "SGD", "Muon"])
def test_plain_and_sharded_parameters_in_one_model(mesh, type):
    mixed = sharded(net(), mesh, only="up")
    plain = net()
    optimizer = build(type, {"lr": 0.01}, mixed)
    reference = build(type, {"lr": 0.01}, plain)
    assert_equal(train(mixed, optimizer), train(plain, reference))
    # A schedule has one rate per group, and has to be loaded on any layout.
    for actual, expected in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert len(actual["params"]) == len(expected["params"])


def test_groups_are_restored_after_a_failed_step(mesh):
    model = sharded(net(), mesh, only="up")
    optimizer = build("AdamW", {"lr": 0.01}, model)
    groups = optimizer.param_groups

    def fail():
        raise ValueError("no loss")

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(ValueError, match="^no loss$"):
        optimizer.step(fail)
    optimizer.step()
    assert optimizer.param_groups is groups
    assert len(groups) == 1


def test_optimizers_without_support_for_shards_are_refused(mesh):
    model = sharded(net(), mesh)
    for name in ("Adafactor", "Rprop"):
        message = f"the optimizer {name}: .*6 here, first `embed.weight`.*; use AdamW"
        with pytest.raises(ModelError, match=message):
            build(name, model=model)
    with pytest.raises(ConfigError, match="fused SGD does not run on sharded parameters"):
        build("SGD", {"fused": True}, model)


def matrices_of(model):
    return [model.up.weight, model.down.weight]


def others_of(model):
    return [model.embed.weight, model.up.bias, model.down.bias, model.lm_head.weight]


def test_muon_updates_the_inner_matrices_and_adamw_the_others():
    model = net()
    optimizer = build("Muon", {"lr": 0.01, "adam_lr": 0.002, "momentum": 0.8, "eps": 1e-9}, model)
    assert isinstance(optimizer, JoinedOptimizer)
    muon, adam = (part.param_groups[0] for part in optimizer.parts)
    assert ids(muon["params"]) == ids(matrices_of(model))
    assert ids(adam["params"]) == ids(others_of(model))
    assert muon["lr"] == 0.01
    assert muon["momentum"] == 0.8
    assert adam["lr"] == 0.002
    assert adam["eps"] == 1e-9
    assert adam["betas"] == (0.9, 0.95)


def test_muon_equals_torchs_muon_and_adamw():
    plain = net()
    muon = torch.optim.Muon(matrices_of(plain), lr=0.02, weight_decay=0.0)
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    adam = torch.optim.AdamW(others_of(plain), **settings)

    class Both:
        def step(self):
            muon.step()
            adam.step()

        def zero_grad(self):
            plain.zero_grad()

    model = net()
    assert_equal(train(model, build("Muon", model=model)), train(plain, Both()))


def test_a_joined_optimizer_is_scheduled_and_resumed_as_one():
    def start():
        model = net()
        optimizer = build("Muon", {"lr": 0.01}, model)
        spec = SchedulerSpec(type="WarmupLR", params={"warmup_num_steps": 4})
        return model, optimizer, build_scheduler(spec, optimizer, total_steps=None)

    def run(model, optimizer, scheduler, seeds):
        for seed in seeds:
            weights = train(model, optimizer, steps=1, seed=seed)
            scheduler.step()
        return weights

    uninterrupted = run(*start(), range(6))
    saved = start()
    run(*saved, range(3))
    resumed = start()
    for loading, saving in zip(resumed, saved, strict=True):
        loading.load_state_dict(copy.deepcopy(saving.state_dict()))
    optimizer = resumed[1]
    assert all(part.state is optimizer.state for part in optimizer.parts)
    assert_equal(run(*resumed, range(3, 6)), uninterrupted)


def test_a_joined_optimizer_calls_a_closure_once():
    model = net()
    optimizer = build("Muon", model=model)
    with pytest.raises(ModelError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))]})
    calls = []
    assert optimizer.step(lambda: calls.append(torch.is_grad_enabled()) or 7.0) == 7.0
    assert calls == [True]


def test_muon_without_a_matrix_to_train_is_refused():
    with pytest.raises(ModelError, match="'Muon'.*has none; use AdamW"):
        build("Muon", model=nn.LayerNorm(4))


def through_a_checkpoint(folder, model, optimizer, other_model, other_optimizer):
    """Save the state of one optimizer in torch's distributed format, and load it into another."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=folder)
    state = get_optimizer_state_dict(other_model, other_optimizer, options=options)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(other_model, other_optimizer, state, options=options)


@pytest.mark.parametrize(
    ("type", "fused"), [("AdamW", (True, True)), ("SGD", (True, False)), ("Muon", (False, False))]
)
@pytest.mark.parametrize("to_plain", [False, True])
def test_a_state_moves_between_plain_and_sharded(mesh, tmp_path, type, fused, to_plain):
    params = {"lr": 0.01, **MOMENTUM.get(type, {})}
    pairs = []
    for model in (net(), sharded(net(), mesh)):
        pairs.append((model, build(type, params, model)))
    saving, loading = reversed(pairs) if to_plain else pairs
    weights = train(*saving)
    with torch.no_grad():
        for name, parameter in loading[0].named_parameters():
            # The shard of a single process is the full parameter.
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(weights[name])
    through_a_checkpoint(tmp_path, *saving, *loading)
    for (_, optimizer), expected in zip(pairs, fused, strict=True):
        assert bool(optimizer.param_groups[0].get("fused")) == expected
    assert_equal(train(*loading, seed=9), train(*saving, seed=9))


def test_a_loaded_state_does_not_change_the_kernel():
    unfused = build("AdamW", {"fused": False})
    loaded = build("AdamW")
    loaded.load_state_dict(unfused.state_dict())
    assert loaded.param_groups[0]["fused"]


class LibraryOptimizer(torch.optim.SGD):
    """Stand-in for the class of a library that may not be installed."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, bias_correction=True):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.betas = betas
        self.bias_correction = bias_correction


@pytest.fixture
def lion_pytorch(monkeypatch):
    module = ModuleType("lion_pytorch")
    module.Lion = LibraryOptimizer
    module.helper = print
    monkeypatch.setitem(sys.modules, "lion_pytorch", module)


@pytest.mark.usefixtures("lion_pytorch")
def test_lion_of_its_library_has_defaults_of_deepspeed():
    optimizer = build("lion")
    assert optimizer.__class__ is LibraryOptimizer
    assert optimizer.defaults["lr"] == 1e-3
    assert optimizer.betas == (0.9, 0.999)
    assert build("Lion", {"lr": 0.1, "betas": [0.8, 0.9]}).betas == (0.8, 0.9)


@pytest.mark.usefixtures("lion_pytorch")
def test_a_class_named_by_its_path():
    """DeepSpeed's defaults and rules do not apply to it."""
    assert build("lion_pytorch.Lion", {"bias_correction": False}).bias_correction is False
    optimizer = build("lion_pytorch.Lion", {"weight_decay": 0.1})
    assert optimizer.__class__ is LibraryOptimizer
    assert optimizer.defaults["lr"] == 1e-4
    assert optimizer.defaults["weight_decay"] == 0.1
    message = "params.weight_decy = 0.1: .* no such parameter; did you mean `weight_decay`"
    with pytest.raises(ConfigError, match=message):
        build("lion_pytorch.Lion", {"weight_decy": 0.1})
    with pytest.raises(ConfigError, match="not a subclass of torch.optim.Optimizer"):
        build("lion_pytorch.helper")
    message = r"cannot be imported .*; install the package `no_such_package`"
    with pytest.raises(ConfigError, match=message):
        build("no_such_package.optim.Best")


def test_lion_without_its_library_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(ConfigError, match="cannot be imported .*; pip install lion-pytorch"):
        build("Lion")


def test_errors_of_an_optimizer_are_config_errors():
    message = r"optimizer.params: Adagrad.* says: Invalid lr_decay value: -1.0; correct"
    with pytest.raises(ConfigError, match=message):
        build("Adagrad", {"lr_decay": -1})
    with pytest.raises(ConfigError, match="fused. and .foreach. cannot be .True. together"):
        build("AdamW", {"fused": True, "foreach": True})
