"""Advice of plait.compat.deepspeed and plait.compat.torch works when it is followed."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import plait
import plait.compat.deepspeed as deepspeed
from plait.compat.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from plait.compat.torch import DistributedDataParallel
from plait.config.resolving.resolve import resolve
from tests.advice import Case, each, failures
from tests.parity import experts

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
TWO_MICRO_BATCHES = {"gradient_accumulation_steps": 2}
INPUT = torch.linspace(-1, 1, 8).view(2, 4)
BATCHES = [(INPUT, INPUT)] * 2


class Net(nn.Module):
    """Two layers, whose constructor may set weights in itself or in a method."""

    def __init__(self, *, in_constructor=False, in_method=False):
        super().__init__()
        self.config = {}
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        if in_constructor:
            self.last.weight.data *= 0.5
        if in_method:
            self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, x):
        return self.last(self.first(x).relu())


def net():
    torch.manual_seed(0)
    return Net()


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=16,
    )
    return LlamaForCausalLM(config)


def mixture():
    return experts.build(experts.Case("mixtral"), device="cpu")


def config_of(stage=1, **sections):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": ADAMW,
        **sections,
    }


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def amsgrad(parameters):
    return torch.optim.AdamW(parameters, amsgrad=True)


def engine_of(stage=1, model=None, sections=None, **arguments):
    arguments = {"config": config_of(stage, **(sections or {})), **arguments}
    return deepspeed.initialize(model=model or net(), **arguments)[0]


def backward(engine):
    engine.backward(engine(INPUT).mean())


def step(engine):
    """Train a step, and return whether a weight changed."""
    before = engine.module_state_dict()
    for _ in range(engine.gradient_accumulation_steps()):
        backward(engine)
        engine.step()
    after = engine.module_state_dict()
    return any(not torch.equal(before[name], after[name]) for name in before)


def trains(**arguments):
    return step(engine_of(**arguments))


def table(call, rows):
    """Return cases of rows (text of the message, refused argument, arguments of remedies...).

    A dict or tuple has several arguments of `call`.
    """

    def run(argument):
        if isinstance(argument, dict):
            return call(**argument)
        if isinstance(argument, tuple):
            return call(*argument)
        return call(argument)

    return [
        Case((text,), partial(run, refused), each(run, *remedies))
        for text, refused, *remedies in rows
    ]


def arguments_of_initialize(folder):
    from_file = {"args": Namespace(deepspeed_config=f"{folder}/ds.json"), "config": None}
    without_optimizer = config_of()
    del without_optimizer["optimizer"]
    without_batch_size = {"optimizer": ADAMW}
    refused = net()
    trained = net()
    last_layer = {"model": refused, "model_parameters": refused.last.parameters()}
    all_layers = {"model": trained, "model_parameters": trained.parameters()}
    return [
        ("takes a torch.nn.Module", {"model": [net()]}, {}),
        ("leave --local_rank out", {"args": Namespace(local_rank=7)}, {"args": Namespace()}),
        ("one in config=; leave one of them out", {"args": from_file["args"]}, from_file, {}),
        ("pass config=, or --deepspeed_config FILE in args", {"config": None}, from_file, {}),
        ("leave it out and set MASTER_PORT", {"distributed_port": 7}, {}),
        (
            "write train_micro_batch_size_per_gpu or train_batch_size",
            {"config": without_batch_size},
            {"config": {**without_batch_size, "train_batch_size": 4}},
            {},
        ),
        (
            'write "optimizer" in the configuration or pass optimizer=',
            {"config": without_optimizer},
            {"config": without_optimizer, "optimizer": sgd},
            {},
        ),
        (
            "creates its own parameter groups; pass all of the model's parameters, or an optimizer",
            {"sections": MUON, **last_layer},
            {"sections": MUON, **all_layers},
            {"optimizer": sgd},
        ),
    ]


def after_backward(use):
    engine = engine_of()
    backward(engine)
    use(engine)


def backward_twice(added):
    """Run backward twice on a graph, or once on the sum."""
    engine = engine_of()
    loss = engine(INPUT).square().mean()
    if added:
        engine.backward(loss + 2 * loss)
    else:
        engine.backward(loss, retain_graph=True)
    engine.step()


def deferred(step_inside=False, nested=False):
    """Accumulate without reduction, and step inside or outside of that context."""
    engine = engine_of(sections=TWO_MICRO_BATCHES)
    with engine.no_sync():
        backward(engine)
        if step_inside:
            engine.step()
        if nested:
            with engine.no_sync():
                pass
    engine.set_gradient_accumulation_boundary(True)
    backward(engine)
    engine.step()
    return engine.was_step_applied()


def step_engine(engine):
    engine.step()


STEPS = [
    ("optimizer.step(): call engine.step()", lambda engine: engine.optimizer.step(), step_engine),
    (
        "call engine.step(), which reduces and clips gradients",
        lambda engine: engine.plait.optimizer.step(),
        step_engine,
    ),
    (
        "the schedule is stepped without arguments; leave it out",
        lambda engine: engine.step(lr_kwargs={"a": 1}),
        step_engine,
    ),
]
DEFERRED = [
    ("engine.step() inside engine.no_sync()", {"step_inside": True}, {}),
    (
        "call engine.set_gradient_accumulation_boundary(True), and run the last"
        " micro-batch and engine.step() outside",
        {"step_inside": True},
        {},
    ),
    ("engine.no_sync() inside engine.no_sync(): remove the inner one", {"nested": True}, {}),
]
SUMS = [("add up its losses, and call engine.backward(loss) once", False, True)]


def use_weight(moment, use, stage=1):
    """Use a weight after micro-batch 0 or 1 of a step, or after the step."""
    engine = engine_of(stage, sections=TWO_MICRO_BATCHES)
    for index in range(2):
        backward(engine)
        if moment == index:
            use(engine)
        engine.step()
    if moment == "end":
        use(engine)


def read(engine):
    deepspeed.utils.safe_get_full_fp32_param(engine.module.last.weight)


def read_unknown(engine):
    deepspeed.utils.safe_get_full_fp32_param(nn.Linear(4, 4).weight)


def read_gradient(engine):
    assert deepspeed.utils.safe_get_full_grad(engine.module.last.weight) is not None


def write(engine):
    deepspeed.utils.safe_set_full_fp32_param(engine.module.last.weight, torch.zeros(4, 4))


def gather_to_write(engine):
    gather_to_read(engine, modifier_rank=0)


def gather_to_read(engine, **arguments):
    with deepspeed.zero.GatheredParameters(engine.module.last.weight, **arguments):
        assert engine.module.last.weight.shape == (4, 4)


def load_weights(engine):
    engine.load_state_dict(net().state_dict())


MOMENTS = [
    (
        "request it after engine.step(), or after the backward of the step's last micro-batch",
        (0, read),
        ("end", read),
        (1, read),
    ),
    (
        "belongs to no model that was passed to deepspeed.initialize; pass a parameter of"
        " engine.module",
        (1, read_unknown),
        (1, read),
    ),
    ("changes weights between a backward and its engine.step()", (1, write), ("end", write)),
    ("call it after engine.step()", (1, write), ("end", write)),
    (
        "zero.GatheredParameters(modifier_rank=...) changes weights between a backward",
        (1, gather_to_write),
        ("end", gather_to_write),
        (1, gather_to_read),
    ),
    ("call it after that", (0, read_gradient, 0), (1, read_gradient, 0)),
    (
        "the gradients would belong to other weights; call it after engine.step()",
        (1, load_weights),
        ("end", load_weights),
    ),
]


def gathered(change, **arguments):
    engine = engine_of()
    with deepspeed.zero.GatheredParameters(engine.module.last.weight, **arguments):
        change(engine.module.last)
    return bool((engine.module_state_dict()["last.weight"] == 1).all())


@torch.no_grad()
def fill_with_ones(layer):
    layer.weight.copy_(torch.ones(4, 4))


def replace_by_ones(layer):
    layer.weight = nn.Parameter(torch.ones(4, 4))


def gather_on_meta(initialized):
    with deepspeed.zero.Init():
        model = Net()
    if initialized:
        engine_of(model=model)
    with deepspeed.zero.GatheredParameters(model.last.weight):
        return model.last.weight.shape == (4, 4)


def built_in_zero_init(enabled=True, initialized_inside=False, **arguments):
    with deepspeed.zero.Init(enabled=enabled):
        model = Net(**arguments)
        if initialized_inside:
            engine_of(model=model)
    return trains(model=model)


GATHERED = [
    (
        "write in place (with torch.no_grad(): engine.module.head.weight.copy_(...))",
        {"change": replace_by_ones, "modifier_rank": 0},
        {"change": fill_with_ones, "modifier_rank": 0},
    ),
    (
        "the change would be lost; pass modifier_rank=0",
        {"change": fill_with_ones},
        {"change": fill_with_ones, "modifier_rank": 0},
    ),
]
ZERO_INIT = [
    (
        "build only the model inside, and call deepspeed.initialize after it",
        {"initialized_inside": True},
        {},
    ),
    (
        "set it in one of those, or build the model without zero.Init() (enabled=False)",
        {"in_constructor": True},
        {"in_method": True},
        {"in_constructor": True, "enabled": False},
    ),
]


def with_checkpoint(folder, use):
    """Save a checkpoint, and use another engine."""
    engine = engine_of()
    step(engine)
    engine.save_checkpoint(folder)
    return use(engine_of())


def renamed(folder, rename):
    """Load the weights of a checkpoint into a model with other names."""
    engine = engine_of()
    step(engine)
    engine.save_checkpoint(folder, tag="names")
    other = engine_of(model=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    if not rename:
        other.load_checkpoint(folder, tag="names", load_module_strict=False)
    trained = net()
    plait.load_trained(trained, folder)
    weights = {
        name.replace("first", "0").replace("last", "2"): tensor
        for name, tensor in trained.state_dict().items()
    }
    other.load_state_dict(weights)
    return torch.equal(other.module_state_dict()["2.bias"], trained.last.bias)


def checkpoints(folder):
    def load(engine, **states):
        return engine.load_checkpoint(folder, **states)[0] is not None

    def load_states(engine, loaded):
        return load(engine, load_optimizer_states=loaded, load_lr_scheduler_states=loaded)

    def save_elsewhere(engine):
        return engine.save_checkpoint(f"{folder}/other") and load(engine)

    return [
        (
            "call engine.load_checkpoint(folder)",
            lambda engine: engine.optimizer.load_state_dict({}),
            load,
        ),
        (
            "save into another folder",
            lambda engine: engine.save_checkpoint(folder, save_latest=False),
            save_elsewhere,
        ),
        (
            "a checkpoint holds all parameters; leave it out",
            lambda engine: engine.save_checkpoint(folder, exclude_frozen_parameters=True),
            lambda engine: engine.save_checkpoint(folder, tag="again"),
        ),
        (
            "pass the same value for both",
            partial(load, load_optimizer_states=False),
            partial(load_states, loaded=True),
            partial(load_states, loaded=False),
        ),
        (
            "build the model again, and call initialize with the new sizes; checkpoints load with"
            " other batch sizes",
            lambda engine: engine.set_train_batch_size,
            lambda engine: load(engine_of(sections=TWO_MICRO_BATCHES)),
        ),
    ]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(INPUT.repeat(4, 1))


class RowsWithoutLength:
    def __getitem__(self, index):
        return INPUT[index]


def load_batch(data, **arguments):
    return next(iter(engine_of().deepspeed_io(data, **arguments))) is not None


def resume_data(samples_per_rank):
    """Go on after 4 samples per rank with another micro-batch size."""
    engine = engine_of(sections={"train_micro_batch_size_per_gpu": samples_per_rank})
    engine.deepspeed_io(Stream()).load_state_dict({"epoch": 0, "read": 4})


LOADERS = [
    (
        "leave data_sampler out, and use at most 1",
        {"data": Stream(), "num_local_io_workers": 2},
        Stream(),
    ),
    (
        "pass a torch.utils.data.Dataset, an IterableDataset of torch",
        RowsWithoutLength(),
        TensorDataset(INPUT),
        Stream(),
    ),
]
POSITIONS = [("keep micro-batch size x data-parallel ranks", 3, 2)]


def trains_llama(parallel, **arguments):
    """Train a language model with DeepSpeed's calls."""
    engine = engine_of(model=llama(), sections={"parallel": parallel}, **arguments)
    ids = torch.arange(8).view(1, 8)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    return engine.was_step_applied()


def train_batch(model, parallel):
    """Train a language model with Plait's call."""
    engine = plait.initialize(model, config_of(parallel=parallel), loss_fn=plait.causal_lm_loss)
    ids = torch.arange(16).view(2, 8) % 12
    loss = engine.train_batch({"input_ids": ids, "labels": ids}).loss
    return bool(torch.isfinite(torch.as_tensor(loss)))


def train_from_meta():
    with torch.device("meta"):
        model = Net()
    return trains(model=model)


DEGREES = 'write the degrees of parallelism in the configuration: "parallel": {"tp": 2}'
LANGUAGE_MODELS = [
    (DEGREES, {"parallel": {}, "mpu": object()}, {"parallel": {"tp": 2}}),
    (DEGREES, {"parallel": {}, "mesh_param": (1, 2)}, {"parallel": {"tp": 2}}),
]


def evaluate(engine):
    engine.eval()
    engine(INPUT)


def offload_states():
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    resolve(plait.load_config(config_of(zero_optimization=offload)), world_size=2)


def single_cases(folder):
    """Return cases whose mistake and remedy have nothing in common."""
    generating = llama()
    rows = [
        (
            "use 1, or plait.initialize(model, config, loss_fn=plait.causal_lm_loss) and its"
            " engine.train_batch",
            partial(trains_llama, {"cp": 2}),
            lambda: trains_llama({"cp": 1}) and train_batch(llama(), {"cp": 2}),
        ),
        (
            "leave it out, or pass an optimizer of your own",
            lambda: FusedAdam(net().parameters(), amsgrad=True),
            lambda: FusedAdam(net().parameters()) and trains(optimizer=amsgrad),
        ),
        (
            "states have the dtype of the master weights; leave it out",
            lambda: DeepSpeedCPUAdam(net().parameters(), fp32_optimizer_states=False),
            lambda: DeepSpeedCPUAdam(net().parameters()),
        ),
        (
            'parameters keep their dtype as master weights; write "bf16": {"enabled": true}',
            lambda: deepspeed.zero.Init(dtype=torch.bfloat16),
            lambda: trains(sections=BF16),
        ),
        (
            "gather the parameters after it",
            partial(gather_on_meta, False),
            partial(gather_on_meta, True),
        ),
        (
            "leave both arguments out. If the names differ, load the checkpoint with"
            " plait.load_trained into a model that has its names, rename those weights, and pass"
            " them to engine.load_state_dict",
            partial(renamed, folder, False),
            partial(renamed, folder, True),
        ),
        (
            "call engine.plait.generate(prompts, ...)",
            lambda: engine_of(model=llama()).generate,
            lambda: engine_of(model=generating).plait.generate([[1]], max_new_tokens=1),
        ),
    ]
    return [Case((text,), mistake, remedy) for text, mistake, remedy in rows]


def missing_names(folder):
    """Return cases of names that Plait does not have."""
    names = {
        (deepspeed, "moe"): (
            'with plait.initialize and "parallel": {"ep": 2}',
            lambda: train_batch(mixture(), {"ep": 2}),
        ),
        (deepspeed, "tp_model_init"): (
            'write "parallel": {"tp": 2} in the configuration',
            partial(trains_llama, {"tp": 2}),
        ),
        (deepspeed, "checkpointing"): (
            'write "parallel": {"recompute": {"mode": "full"}} in the configuration',
            partial(trains_llama, {"recompute": {"mode": "full"}}),
        ),
        (deepspeed, "DeepSpeedConfig"): (
            "call plait.load_config(file)",
            lambda: plait.load_config(f"{folder}/ds.json"),
        ),
        (deepspeed, "OnDevice"): ("build the model under torch.device('meta')", train_from_meta),
        (deepspeed.utils, "safe_get_local_grad"): (
            "call the function with `full` in place of `local`",
            partial(use_weight, 1, read_gradient),
        ),
        (deepspeed.utils, "set_z3_leaf_modules"): (
            "units are the model's blocks; name them in parallel.blocks",
            lambda: trains(sections={"parallel": {"blocks": ["first", "last"]}}),
        ),
    }
    methods = {
        "to": ("initialize has moved the model to engine.device", lambda: engine_of().device),
        "cpu": (
            "call save_16bit_model or module_state_dict to get the weights",
            lambda: engine_of().module_state_dict(),
        ),
        "half": (
            'write "bf16": {"enabled": true} or "fp16" in the configuration',
            lambda: trains(sections=BF16) and trains(sections=FP16),
        ),
        "offload_states": (
            '"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}',
            offload_states,
        ),
        "compile": (
            'write "compile": {"enabled": true} in the configuration',
            lambda: plait.load_config(config_of(compile={"enabled": True})),
        ),
        "eval_batch": ("call engine.eval() and engine(batch)", lambda: evaluate(engine_of())),
    }
    for (module, name), (text, remedy) in names.items():
        yield Case((text,), partial(getattr, module, name), remedy)
    for name, (text, remedy) in methods.items():
        yield Case((text,), lambda name=name: getattr(engine_of(), name), remedy)


def train_on(create):
    """Return a function of an engine that trains on what `create` returns."""
    return lambda engine: bool(torch.isfinite(engine.train_batch(create())))


train_on_iterator = train_on(lambda: iter(BATCHES))
train_on_repeated = train_on(lambda: iter(deepspeed.utils.RepeatingLoader(BATCHES)))


def pipeline(use=train_on_iterator, *, data=None, parallel=None, **arguments):
    """Use the engine of a PipelineModule with some arguments."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    defaults = {"num_stages": 2, "loss_fn": F.mse_loss}
    model = deepspeed.PipelineModule(layers, **{**defaults, **arguments})
    sections = {**TWO_MICRO_BATCHES, "parallel": parallel or {}}
    return use(engine_of(0, model, sections, training_data=data))


def evaluate_once(engine):
    return bool(torch.isfinite(engine.eval_batch(iter(BATCHES))))


def evaluate_twice(engine):
    engine.eval_batch(iter(BATCHES))
    engine.eval_batch(iter(BATCHES), compute_loss=False, reduce_output=None)


def pipelines(folder):
    def save_weights(engine):
        engine.save_16bit_model(folder, "pipeline.bin")
        dist.barrier()
        return len(torch.load(f"{folder}/pipeline.bin")) == 4

    train_on_dataset = {"use": train_on(lambda: None), "data": TensorDataset(INPUT, INPUT)}
    return [
        (
            "call engine.train_batch(iterator) or engine.eval_batch(iterator)",
            lambda engine: engine(INPUT),
            train_on_iterator,
            evaluate_once,
        ),
        (
            "pass an iterator, or training_data= to initialize",
            train_on(lambda: None),
            train_on_iterator,
            train_on_dataset,
        ),
        (
            "create `batches = iter(...)` or RepeatingLoader(...) once, and pass it to every call",
            train_on(lambda: BATCHES),
            train_on_iterator,
            train_on_repeated,
        ),
        (
            "train fewer steps, or pass RepeatingLoader(...)",
            train_on(lambda: iter(BATCHES[:1])),
            train_on_iterator,
            train_on_repeated,
        ),
        (
            "call it twice for both",
            lambda engine: engine.eval_batch(iter(BATCHES), return_logits=True),
            evaluate_twice,
        ),
        ("call engine.save_16bit_model", lambda engine: engine.module_state_dict(), save_weights),
        (
            "layers are recomputed one by one; use 1",
            {"activation_checkpoint_interval": 2},
            {"activation_checkpoint_interval": 1},
        ),
        (
            "and stages are balanced by predicted time; leave it out",
            {"partition_method": "random"},
            {},
        ),
        ("leave them out: layers are initialised by name", {"seed_layers": True}, {}),
        (
            "the PipelineModule has no loss; pass loss_fn=, a function of (output, labels)",
            {"loss_fn": None},
            {},
        ),
        (
            'write the degrees in the configuration ("parallel": {"pp": 2',
            {"topology": object()},
            {"parallel": {"pp": 2}, "num_stages": None},
        ),
    ]


PROMPT = torch.arange(3).view(1, 3)


def generate(prompt=PROMPT, model=None, attention_mask=None, **arguments):
    engine = deepspeed.init_inference(model or llama(), **arguments)
    tokens = engine.generate(prompt, attention_mask=attention_mask, max_new_tokens=2)
    return tokens.shape == (1, 5)


def inference(folder):
    return [
        (
            'pass a tokenizer\'s input_ids as a tensor (return_tensors="pt")',
            {"prompt": [[0, 1, 2]]},
            {},
        ),
        ("generate takes token ids [batch, length]", {"prompt": PROMPT[0]}, {}),
        (
            "pass both as the tokenizer made them",
            {"attention_mask": PROMPT[:, 1:]},
            {"attention_mask": torch.ones_like(PROMPT)},
        ),
        (
            "pass a dict, or the path of a file with a JSON object",
            {"config": f"{folder}/gone.json"},
            {"config": {"dtype": "fp32"}},
            {"config": f"{folder}/inference.json"},
        ),
        (
            "differ; pass one of them",
            {"mp_size": 2, "tp": {"tp_size": 1}},
            {"mp_size": 2},
            {"tp": {"tp_size": 2}},
        ),
        (
            "tp_size must be a whole number of at least 1; correct it",
            {"tp": {"tp_size": 0}},
            {"tp": {"tp_size": 1}},
        ),
        (
            "use one of fp32, float, fp16, half, bf16, bfloat16",
            {"dtype": "int8"},
            {"dtype": "fp32"},
            {"dtype": "bf16"},
        ),
        (
            "leave it out, and split all layers, experts included, with tensor_parallel",
            {"moe": True},
            {"model": mixture(), "tensor_parallel": {"tp_size": 2}},
        ),
        (
            "build the model with plait.from_pretrained(folder)",
            {"checkpoint": folder},
            {"model": plait.from_pretrained(f"{folder}/llama")},
        ),
    ]


def distributed(sections=None, model=None, use=None, **arguments):
    """Train under Plait's DistributedDataParallel."""
    if sections is not None:
        arguments["config"] = {"train_micro_batch_size_per_gpu": 2, **sections}
    wrapped = DistributedDataParallel(model or net(), **arguments)
    if use is not None:
        use(wrapped)
    if model is None:
        wrapped(INPUT).square().mean().backward()
        return any(parameter.grad is not None for parameter in wrapped.parameters())
    return True


def own_loop():
    sharded = plait.parallelize(net(), config_of(2))
    optimizer = sgd(sharded.model.parameters())
    sharded.backward(sharded(INPUT).square().mean())
    sharded.step(optimizer)


def wrapped_models():
    with_tp = {"model": llama(), "sections": {"parallel": {"tp": 2}}}
    return [
        ("knows no such argument; leave it out", {"nosuch": 1}, {}),
        ('write "parallel": {"tp": 2} in config=', {"device_mesh": object()}, with_tp),
        (
            'for example from "parallel": {"tp": 2}',
            {"process_group": object()},
            {**with_tp, "model": llama()},
        ),
        (
            'write "bf16": {"enabled": true} in config=',
            {"mixed_precision": object()},
            {"sections": BF16},
        ),
        (
            'write "parallel": {"compress_gradients": ...} in config=',
            {"use": lambda wrapped: wrapped.register_comm_hook(None, id)},
            {"sections": {"parallel": {"compress_gradients": "int8"}}},
        ),
    ]


def all_failures(rank, world, folder):
    """Return the failures of all cases. Runs on every rank."""
    float16 = Case(
        (
            "use plait.parallelize(model, config), sharded.backward or sharded.forward_backward,"
            " and sharded.step(optimizer)",
        ),
        partial(distributed, FP16),
        own_loop,
    )
    return failures(
        [
            *table(trains, arguments_of_initialize(folder)),
            *table(after_backward, STEPS),
            *table(backward_twice, SUMS),
            *table(deferred, DEFERRED),
            *table(use_weight, MOMENTS),
            *table(gathered, GATHERED),
            *table(built_in_zero_init, ZERO_INIT),
            *table(partial(with_checkpoint, folder), checkpoints(folder)),
            *table(load_batch, LOADERS),
            *table(resume_data, POSITIONS),
            *table(trains_llama, LANGUAGE_MODELS),
            *single_cases(folder),
            *missing_names(folder),
            *table(pipeline, pipelines(folder)),
            *table(generate, inference(folder)),
            *table(distributed, wrapped_models()),
            float16,
        ]
    )


def test_deepspeed_advice_works_when_it_is_followed(pool, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(config_of()))
    (tmp_path / "inference.json").write_text(json.dumps({"dtype": "fp32"}))
    llama().save_pretrained(tmp_path / "llama")
    for messages in pool.run(2, all_failures, str(tmp_path)):
        assert not messages, "\n".join(messages)
