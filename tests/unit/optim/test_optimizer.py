"""Every optimizer that a file can name does what torch's (or the library's) does, on plain and on sharded parameters."""

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
    """An embedding, two matrices, biases and a head tied to nothing."""

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
    values = dict(model.named_parameters())
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().double()
        for name, p in values.items()
    }


def assert_equal(ours, theirs, tolerance=1e-12):
    ours = {name: ours[name] for name in theirs}
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(model, mesh, *, only=None):
    fully_shard(model if only is None else getattr(model, only), mesh=mesh)
    return model


MEANINGS = [
    ("AdamW", {}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ("adamw", {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}, torch.optim.AdamW,
     {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.AdamW, {"weight_decay": 0.1}),
    ("Adam", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
    ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, {}),
    ("AdamW", {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}, torch.optim.AdamW, {"lr": 5e-5, "weight_decay": 0.0}),
    ("AdamW", {"bias_correction": True, "set_grad_none": True, "fp32_optimizer_states": True}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ("AdamW", {"amsgrad": True, "maximize": True}, torch.optim.AdamW, {"amsgrad": True, "maximize": True, "weight_decay": 0.0}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr": 0.1}, torch.optim.Adagrad, {"lr": 0.1}),
    ("RMSprop", {"momentum": 0.5}, torch.optim.RMSprop, {"momentum": 0.5}),
    ("NAdam", {}, torch.optim.NAdam, {}),
    ("Adafactor", {"lr": 0.1}, torch.optim.Adafactor, {"lr": 0.1}),
    ("torch.optim.AdamW", {"lr": 0.1}, torch.optim.AdamW, {"lr": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("type", "params", "torch_class", "torch_params"), MEANINGS)
def test_a_name_means_torchs_optimizer_with_deepspeeds_defaults(
    type, params, torch_class, torch_params
):
    ours, theirs = net(), net()
    optimizer = build(type, params, ours)
    assert optimizer.__class__ is torch_class
    reference = torch_class(theirs.parameters(), **torch_params)
    assert_equal(train(ours, optimizer), train(theirs, reference))


def ids(parameters):
    return [id(parameter) for parameter in parameters]


def test_frozen_parameters_are_excluded_and_tied_updated_once():
    model = net()
    model.up.requires_grad_(False)
    model.lm_head.weight = model.embed.weight
    named = list(model.named_parameters(remove_duplicate=False))
    [group] = build_optimizer(OptimizerSpec(), named).param_groups
    assert ids(group["params"]) == ids([model.embed.weight, model.down.weight, model.down.bias])


def test_a_model_with_nothing_to_train_is_refused():
    words = "no parameter of the model requires a gradient.*requires_grad_"
    with pytest.raises(ModelError, match=words):
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
    """B4: other stages have parameters to train."""
    optimizer = build(type, model=net().requires_grad_(False))
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("type", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_the_fused_kernel_is_used_where_it_is_right(type, dtype):
    broken = type == "SGD" and dtype in (torch.bfloat16, torch.float16)
    parameter = nn.Parameter(torch.linspace(-1, 1, 100).to(dtype))
    exact = nn.Parameter(parameter.detach().double())
    params = {"lr": 0.01, **({"momentum": 0.9} if type == "SGD" else {})}
    optimizer = build_optimizer(OptimizerSpec(type=type, params=params), [("p", parameter)])
    reference = optimizer.__class__([exact], **params, weight_decay=0.0, foreach=False)
    assert bool(optimizer.param_groups[0].get("fused")) is not broken
    for step in range(5):
        grad = torch.cos(torch.arange(100.0) + step)
        parameter.grad, exact.grad = grad.to(dtype), grad.double()
        optimizer.step()
        reference.step()
    # Five roundings to the parameter's own type. torch's fused SGD, which skips most elements, is wrong by 0.1.
    torch.testing.assert_close(parameter.double(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "more", [{}, {"nesterov": True}, {"dampening": 0.4}, {"maximize": True, "dampening": 0.3}]
)
def test_momentum_of_a_late_gradient(more):
    """Parameters whose first gradient comes late, or that miss a step, are updated as by torch's plain SGD."""
    params = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, **more}
    ours, theirs = net(), net()
    optimizer = build("SGD", params, ours)
    plain = torch.optim.SGD(theirs.parameters(), **params, foreach=False, fused=False)
    assert optimizer.param_groups[0]["fused"]
    generator = torch.Generator().manual_seed(4)
    for used in (["embed"], ["embed", "up"], ["down"], ["embed", "up", "down", "lm_head"]):
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            gradient = torch.randn(one.shape, dtype=one.dtype, generator=generator)
            if name.partition(".")[0] in used:
                one.grad, other.grad = gradient, gradient.clone()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    assert_equal(dict(ours.named_parameters()), dict(theirs.named_parameters()), 1e-15)


def test_what_the_user_says_about_the_kernel_is_kept_or_refused():
    assert not build("AdamW", {"fused": False}).param_groups[0]["fused"]
    assert build("AdamW", {"foreach": True}).param_groups[0]["fused"] is None
    words = "optimizer.params.fused = True: .*unchanged on CPU .*191763.*; leave it out"
    with pytest.raises(ConfigError, match=words):
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
)  # fmt: skip
def test_shards_are_updated_as_whole_parameters_are(mesh, type, params, fused):
    plain, shards = net(), sharded(net(), mesh)
    optimizer = build(type, params, shards)
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    assert bool(optimizer.param_groups[0].get("fused")) is fused
    assert_equal(train(shards, optimizer), train(plain, build(type, params, plain)))


@pytest.mark.parametrize("type", ["AdamW", "SGD", "Muon"])
def test_plain_and_sharded_parameters_stand_beside_each_other(mesh, type):
    plain, mixed = net(), sharded(net(), mesh, only="up")
    optimizer, other = build(type, {"lr": 0.01}, mixed), build(type, {"lr": 0.01}, plain)
    assert_equal(train(mixed, optimizer), train(plain, other))
    # A schedule has one rate per group, and has to be loaded on any layout.
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["params"]) for group in other.param_groups
    ]


def test_groups_are_whole_again_after_a_failed_step(mesh):
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
    assert optimizer.param_groups is groups and len(groups) == 1


def test_what_torch_cannot_do_on_shards_is_refused(mesh):
    model = sharded(net(), mesh)
    for name in ("Adafactor", "Rprop"):
        words = f"the optimizer {name}: .*sharded parameters \\(6 here, first `embed.weight`\\); use AdamW"
        with pytest.raises(ModelError, match=words):
            build(name, model=model)
    with pytest.raises(ConfigError, match="fused SGD does not run on sharded parameters"):
        build("SGD", {"fused": True}, model)


def test_muon_takes_the_inner_matrices_and_adamw_the_others():
    model = net()
    optimizer = build("Muon", {"lr": 0.01, "adam_lr": 0.002, "momentum": 0.8, "eps": 1e-9}, model)
    assert isinstance(optimizer, JoinedOptimizer)
    muon, adam = optimizer.parts
    muon, adam = (part.param_groups[0] for part in optimizer.parts)
    rest = [model.embed.weight, model.up.bias, model.down.bias, model.lm_head.weight]
    assert ids(muon["params"]) == ids([model.up.weight, model.down.weight])
    assert ids(adam["params"]) == ids(rest)
    assert (muon["lr"], muon["momentum"]) == (0.01, 0.8)
    assert (adam["lr"], adam["eps"], adam["betas"]) == (0.002, 1e-9, (0.9, 0.95))


def test_muon_is_torchs_beside_torchs_adamw():
    ours, theirs = net(), net()
    matrices = [theirs.up.weight, theirs.down.weight]
    rest = [p for p in theirs.parameters() if all(p is not m for m in matrices)]
    a = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0)
    b = torch.optim.AdamW(rest, lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)

    class Both:
        def step(self):
            a.step()
            b.step()

        def zero_grad(self):
            a.zero_grad()
            b.zero_grad()

    assert_equal(train(ours, build("Muon", model=ours)), train(theirs, Both()))


def test_a_joined_optimizer_is_scheduled_saved_and_loaded_as_one():
    def start():
        model = net()
        optimizer = build("Muon", {"lr": 0.01}, model)
        spec = SchedulerSpec(type="WarmupLR", params={"warmup_num_steps": 4})
        return model, optimizer, build_scheduler(spec, optimizer, total_steps=None)

    def go(model, optimizer, scheduler, seeds):
        for seed in seeds:
            after = train(model, optimizer, steps=1, seed=seed)
            scheduler.step()
        return after

    whole = go(*start(), range(6))
    model, optimizer, scheduler = start()
    go(model, optimizer, scheduler, range(3))
    resumed = start()
    resumed[0].load_state_dict(copy.deepcopy(model.state_dict()))
    resumed[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed[2].load_state_dict(scheduler.state_dict())
    assert all(part.state is resumed[1].state for part in resumed[1].parts)
    assert_equal(go(*resumed, range(3, 6)), whole)


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
    """Save the state of one optimizer and load it into another, in torch's distributed format, keyed by parameter name."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=folder)
    state = get_optimizer_state_dict(other_model, other_optimizer, options=options)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(other_model, other_optimizer, state, options=options)


@pytest.mark.parametrize(
    ("type", "fused"), [("AdamW", (True, True)), ("SGD", (True, False)), ("Muon", (False, False))]
)
@pytest.mark.parametrize("back", [False, True])
def test_a_state_moves_between_plain_and_sharded_parameters(mesh, tmp_path, type, fused, back):
    plain, shards = net(), sharded(net(), mesh)
    params = {"lr": 0.01, **({"momentum": 0.9} if type == "SGD" else {})}
    pair = [(plain, build(type, params, plain)), (shards, build(type, params, shards))]
    first, second = reversed(pair) if back else pair
    after = train(*first)
    with torch.no_grad():
        for name, p in second[0].named_parameters():
            # One process: its shard is the full parameter.
            (p.to_local() if isinstance(p, DTensor) else p).copy_(after[name])
    through_a_checkpoint(tmp_path, *first, *second)
    assert tuple(bool(optimizer.param_groups[0].get("fused")) for _, optimizer in pair) == fused
    assert_equal(train(*second, seed=9), train(*first, seed=9))


def test_the_kernel_is_not_taken_from_a_state_dict():
    unfused = build("AdamW", {"fused": False})
    loaded = build("AdamW")
    loaded.load_state_dict(unfused.state_dict())
    assert loaded.param_groups[0]["fused"]


class Library(torch.optim.SGD):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, bias_correction=True):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.betas, self.bias_correction = betas, bias_correction


@pytest.fixture
def package(monkeypatch):
    made = ModuleType("lion_pytorch")
    made.Lion, made.helper = Library, print
    monkeypatch.setitem(sys.modules, "lion_pytorch", made)


def test_lion_is_lion_pytorchs_with_deepspeeds_defaults(package):
    optimizer = build("lion")
    assert optimizer.__class__ is Library
    assert (optimizer.defaults["lr"], optimizer.betas) == (1e-3, (0.9, 0.999))
    assert build("Lion", {"lr": 0.1, "betas": [0.8, 0.9]}).betas == (0.8, 0.9)


def test_a_class_is_named_by_its_path_and_checked_when_built(package):
    # DeepSpeed's rules do not apply to a library's class.
    assert build("lion_pytorch.Lion", {"bias_correction": False}).bias_correction is False
    optimizer = build("lion_pytorch.Lion", {"weight_decay": 0.1})
    assert optimizer.__class__ is Library
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (1e-4, 0.1)
    words = "optimizer.params.weight_decy = 0.1: Library has no such parameter; did you mean `weight_decay`"
    with pytest.raises(ConfigError, match=words):
        build("lion_pytorch.Lion", {"weight_decy": 0.1})
    with pytest.raises(ConfigError, match="not a subclass of torch.optim.Optimizer"):
        build("lion_pytorch.helper")
    words = r"cannot be imported .*; install the package `no_such_package`"
    with pytest.raises(ConfigError, match=words):
        build("no_such_package.optim.Best")


def test_lion_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(ConfigError, match="cannot be imported .*; pip install lion-pytorch"):
        build("Lion")


def test_what_an_optimizer_itself_refuses_is_a_config_error():
    words = (
        r"optimizer.params: Adagrad\(lr_decay=-1.0\) says: Invalid lr_decay value: -1.0; correct"
    )
    with pytest.raises(ConfigError, match=words):
        build("Adagrad", {"lr_decay": -1})
    with pytest.raises(ConfigError, match="fused. and .foreach. cannot be .True. together"):
        build("AdamW", {"fused": True, "foreach": True})
