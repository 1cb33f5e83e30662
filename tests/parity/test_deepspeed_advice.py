"""What plait.compat.deepspeed and plait.compat.torch advise works when it is followed, on two processes."""

from __future__ import annotations

import argparse
import json
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
X = torch.linspace(-1, 1, 8).view(2, 4)


class Net(nn.Module):
    """Two layers, whose constructor may set a weight."""

    def __init__(self, *, scale=False, method=False):
        super().__init__()
        self.config = {}
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        if scale:
            self.last.weight.data *= 0.5
        if method:
            self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, x):
        return self.last(self.first(x).relu())


def net():
    torch.manual_seed(0)
    return Net()


def config(stage=1, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": ADAMW,
        **more,
    }


def engine_of(stage=1, model=None, settings=None, **more):
    arguments = {"config": config(stage, **(settings or {})), **more}
    return deepspeed.initialize(model=model or net(), **arguments)[0]


def step(engine, *, after_backward=None):
    """Train, and tell whether a weight changed. `after_backward` is called before the step."""
    before = engine.module_state_dict()
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(X).square().mean())
        if after_backward is not None:
            after_backward(engine)
        engine.step()
    after = engine.module_state_dict()
    return any(not torch.equal(before[name], after[name]) for name in before)


def trains(**more):
    return step(engine_of(**more))


def lacks_optimizer(**more):
    settings = config()
    if more.pop("left_out", True):
        del settings["optimizer"]
    return step(engine_of(config=settings, **more))


def twice(added):
    """Run backward twice on a graph, or once on the sum."""
    engine = engine_of()
    loss = engine(X).square().mean()
    if added:
        engine.backward(loss + 2 * loss)
    else:
        engine.backward(loss, retain_graph=True)
    engine.step()


def deferred(inside, nested=False):
    engine = engine_of(settings={"gradient_accumulation_steps": 2})
    with engine.no_sync():
        engine.backward(engine(X).mean())
        if inside:
            engine.step()
        if nested:
            with engine.no_sync():
                pass
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(X).mean())
    engine.step()
    return engine.was_step_applied()


def call(step_of):
    """Call a step of the engine, or of its optimizer."""
    engine = engine_of()
    engine.backward(engine(X).mean())
    step_of(engine)


def loads(folder, how):
    engine = engine_of()
    step(engine)
    engine.save_checkpoint(folder)
    return how(engine_of(), folder)


def method(name):
    engine = engine_of()
    return getattr(engine, name)


def between(at, use, stage=1):
    """Use a parameter between two micro-batches, after them, or after the step."""
    engine = engine_of(stage, settings={"gradient_accumulation_steps": 2})
    for index in range(2):
        engine.backward(engine(X).mean())
        if at == index:
            use(engine)
        engine.step()
    if at == "end":
        use(engine)


def read(engine):
    return deepspeed.utils.safe_get_full_fp32_param(engine.module.last.weight)


def gradient(engine):
    assert deepspeed.utils.safe_get_full_grad(engine.module.last.weight) is not None


def write(engine):
    deepspeed.utils.safe_set_full_fp32_param(engine.module.last.weight, torch.zeros(4, 4))


def gathered(change, **arguments):
    engine = engine_of()
    with deepspeed.zero.GatheredParameters(engine.module.last.weight, **arguments):
        change(engine.module.last)
    return bool((engine.module_state_dict()["last.weight"] == 1).all())


@torch.no_grad()
def ones(layer):
    layer.weight.copy_(torch.ones(4, 4))


def replace(layer):
    layer.weight = nn.Parameter(torch.ones(4, 4))


def gathers_on_meta(before):
    with deepspeed.zero.Init():
        model = Net()
    if not before:
        engine_of(model=model)
    with deepspeed.zero.GatheredParameters(model.last.weight):
        return model.last.weight.shape == (4, 4)


def built(enabled=True, **model):
    with deepspeed.zero.Init(enabled=enabled):
        made = Net(**model)
    return trains(model=made)


def on_meta():
    with torch.device("meta"):
        model = Net()
    return trains(model=model)


def initialized_inside(inside):
    with deepspeed.zero.Init():
        model = Net()
        if inside:
            engine_of(model=model)
    return trains(model=model)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X.repeat(4, 1))


class Rows:
    """Rows without a length."""

    def __getitem__(self, index):
        return X[index]


def loader(data, **arguments):
    return next(iter(engine_of().deepspeed_io(data, **arguments))) is not None


def left_after(samples_per_rank):
    """Go on with data after 4 samples."""
    state = {"epoch": 0, "read": 4}
    made = engine_of(settings={"train_micro_batch_size_per_gpu": samples_per_rank})
    made.deepspeed_io(Stream()).load_state_dict(state)


def pipeline(use, *, parallel=None, **module):
    """Use the engine of a pipeline. `module` are arguments of PipelineModule."""
    torch.manual_seed(0)
    data = module.pop("data", None)
    arguments = {"num_stages": 2, "loss_fn": F.mse_loss, **module}
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = deepspeed.PipelineModule(layers, **arguments)
    settings = {"gradient_accumulation_steps": 2, "parallel": parallel or {}}
    engine = engine_of(0, model, settings, training_data=data)
    return use(engine)


BATCHES = [(X, X)] * 2


def full_step(batches):
    return lambda engine: bool(torch.isfinite(engine.train_batch(batches)))


def evaluated(*arguments):
    def use(engine):
        for more in arguments:
            engine.eval_batch(iter(BATCHES), **more)

    return use


def saved(folder):
    def use(engine):
        engine.save_16bit_model(folder, "pipeline.bin")
        dist.barrier()
        return len(torch.load(f"{folder}/pipeline.bin")) == 4

    return use


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def language(parallel, **more):
    """Train a language model with DeepSpeed's calls."""
    if more:
        return trains(model=llama(), **more)
    engine = engine_of(model=llama(), settings={"parallel": parallel})
    ids = torch.arange(8).view(1, 8)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    return engine.was_step_applied()


def by_steps(model, parallel, **settings):
    """Train with Plait's calls."""
    engine = plait.initialize(
        model, config(parallel=parallel, **settings), loss_fn=plait.causal_lm_loss
    )
    ids = torch.arange(16).view(2, 8) % 12
    return bool(
        torch.isfinite(torch.tensor(engine.train_batch({"input_ids": ids, "labels": ids}).loss))
    )


def mixture():
    return experts.build(experts.Case("mixtral"), device="cpu")


def generated(ids, model=None, **arguments):
    engine = deepspeed.init_inference(model or llama(), **arguments)
    return engine.generate(ids, max_new_tokens=2).shape == (1, 5)


def missing(name, module=deepspeed):
    return lambda: getattr(module, name)


def renamed(folder, rename):
    """Load the weights of a checkpoint under other names."""
    engine = engine_of()
    step(engine)
    engine.save_checkpoint(folder, tag="names")
    other = engine_of(model=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    if not rename:
        other.load_checkpoint(folder, tag="names", load_module_strict=False)
    filled = net()
    plait.load_trained(filled, folder)
    state = filled.state_dict()
    names = {"first": "0", "last": "2"}
    weights = {
        f"{names[layer]}.{kind}": state[f"{layer}.{kind}"]
        for layer in names
        for kind in ("weight", "bias")
    }
    other.load_state_dict(weights)
    return torch.equal(other.module_state_dict()["2.bias"], state["last.bias"])


def grouped(optimizer_type, model_parameters):
    model = net()
    parameters = (model.last if model_parameters == "some" else model).parameters()
    optimizer = {"type": optimizer_type, "params": {"lr": 0.1}}
    return trains(model=model, settings={"optimizer": optimizer}, model_parameters=parameters)


def distributed(setting=None, **arguments):
    """Train with torch's wrapper."""
    if setting is not None:
        arguments["config"] = {"train_micro_batch_size_per_gpu": 2, **setting}
    model = DistributedDataParallel(net(), **arguments)
    model(X).square().mean().backward()
    return any(parameter.grad is not None for parameter in model.parameters())


def own_loop():
    model = plait.parallelize(net(), config(2))
    optimizer = torch.optim.SGD(model.model.parameters(), lr=0.1)
    model.backward(model(X).square().mean())
    model.step(optimizer)


def of_deepspeed(folder):
    """Cases for two processes."""
    accumulating = {"gradient_accumulation_steps": 2}
    seven = argparse.Namespace(local_rank=7)
    args = argparse.Namespace(deepspeed_config=f"{folder}/ds.json")
    inference = partial(deepspeed.init_inference, llama())
    prompt = torch.arange(3).view(1, 3)
    return [
        Case(("optimizer.step(): call engine.step()",), lambda: call(lambda e: e.optimizer.step()), lambda: call(lambda e: e.step())),
        Case(("call engine.load_checkpoint(folder)",), lambda: loads(folder, lambda e, f: e.optimizer.load_state_dict({})), lambda: loads(folder, lambda e, f: e.load_checkpoint(f)[0] is not None)),
        Case(("call engine.step(), which reduces and clips gradients",), lambda: call(lambda e: e.plait.optimizer.step()), lambda: call(lambda e: e.step())),
        Case(("add up its losses, and call engine.backward(loss) once",), lambda: twice(False), lambda: twice(True)),
        Case(("the schedule is stepped without arguments; leave it out",), lambda: call(lambda e: e.step(lr_kwargs={"a": 1})), lambda: call(lambda e: e.step())),
        Case(("engine.step() inside engine.no_sync()", "call engine.set_gradient_accumulation_boundary(True), and run the last micro-batch and engine.step() outside"), lambda: deferred(True), lambda: deferred(False)),
        Case(("engine.no_sync() inside engine.no_sync(): remove the inner one",), lambda: deferred(False, nested=True), lambda: deferred(False)),
        Case(('write "optimizer" in the configuration or pass optimizer=',), lacks_optimizer, lambda: lacks_optimizer(left_out=False) and lacks_optimizer(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))),
        Case(("request it after engine.step(), or after the backward of the step's last micro-batch",), lambda: between(0, read), lambda: (between("end", read), between(1, read))),
        Case(("belongs to no model that was passed to deepspeed.initialize; pass a parameter of engine.module",), lambda: between(1, lambda e: deepspeed.utils.safe_get_full_fp32_param(nn.Linear(4, 4).weight)), lambda: between(1, read)),
        Case(("changes weights between a backward and its engine.step()", "call it after engine.step()"), lambda: between(1, write), lambda: between("end", write)),
        Case(("call it after that",), lambda: between(0, gradient, 0), lambda: between(1, gradient, 0)),
        Case(("save into another folder",), lambda: loads(folder, lambda e, f: e.save_checkpoint(f, save_latest=False)), lambda: loads(folder, lambda e, f: e.save_checkpoint(f"{f}/other") and e.load_checkpoint(f)[0] is not None)),
        Case(("a checkpoint holds all parameters; leave it out",), lambda: loads(folder, lambda e, f: e.save_checkpoint(f, exclude_frozen_parameters=True)), lambda: loads(folder, lambda e, f: e.save_checkpoint(f, tag="again"))),
        Case(("pass the same value for both",), lambda: loads(folder, lambda e, f: e.load_checkpoint(f, load_optimizer_states=False)), each(lambda both: loads(folder, lambda e, f: e.load_checkpoint(f, load_optimizer_states=both, load_lr_scheduler_states=both)[0] is not None), True, False)),
        Case(("leave them out, or load it into a model with its names by plait.load_trained and pass the weights, renamed, to engine.load_state_dict",), lambda: renamed(folder, False), lambda: renamed(folder, True)),
        Case(("the gradients would belong to other weights; call it after engine.step()",), lambda: between(1, lambda e: e.load_state_dict(net().state_dict())), lambda: between("end", lambda e: e.load_state_dict(net().state_dict()))),
        Case(("takes a torch.nn.Module",), lambda: deepspeed.initialize(model=[net()], config=config()), trains),
        Case(("build only the model inside, and call deepspeed.initialize after it",), lambda: initialized_inside(True), lambda: initialized_inside(False)),
        Case(("leave --local_rank out",), lambda: trains(args=seven), lambda: trains(args=argparse.Namespace())),
        Case(("one in config=; leave one of them out",), lambda: trains(args=args), lambda: trains(args=args, config=None) and trains()),
        Case(("pass config=, or --deepspeed_config FILE in args",), lambda: trains(config=None), lambda: trains() and trains(args=args, config=None)),
        Case(("write train_micro_batch_size_per_gpu or train_batch_size",), lambda: trains(config={"optimizer": ADAMW}), lambda: trains() and trains(config={"optimizer": ADAMW, "train_batch_size": 4})),
        Case(("use 1, or plait.initialize(model, config, loss_fn=plait.causal_lm_loss) and its engine.train_batch",), lambda: language({"cp": 2}), lambda: language({"cp": 1}) and by_steps(llama(), {"cp": 2})),
        Case(("creates its own parameter groups; pass all of the model's parameters, or an optimizer",), lambda: grouped("Muon", "some"), lambda: grouped("Muon", "all") and trains(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))),
        Case(('write the degrees of parallelism in the configuration: "parallel": {"tp": 2}',), lambda: language({}, mpu=object()), lambda: language({"tp": 2})),
        Case(('write the degrees of parallelism in the configuration: "parallel": {"tp": 2}',), lambda: language({}, mesh_param=(1, 2)), lambda: language({"tp": 2})),
        Case(("leave it out and set MASTER_PORT",), lambda: trains(distributed_port=7), trains),
        Case(('with plait.initialize and "parallel": {"ep": 2}',), missing("moe"), lambda: by_steps(mixture(), {"ep": 2})),
        Case(('write "parallel": {"tp": 2} in the configuration',), missing("tp_model_init"), lambda: language({"tp": 2})),
        Case(('write "parallel": {"recompute": {"mode": "full"}} in the configuration',), missing("checkpointing"), lambda: language({"recompute": {"mode": "full"}})),
        Case(("call plait.load_config(file)",), missing("DeepSpeedConfig"), lambda: plait.load_config(f"{folder}/ds.json")),
        Case(("build the model under torch.device('meta')",), missing("OnDevice"), on_meta),
        Case(("call the function with `full` in place of `local`",), missing("safe_get_local_grad", deepspeed.utils), lambda: between(1, gradient)),
        Case(("units are the model's blocks; name them in parallel.blocks",), missing("set_z3_leaf_modules", deepspeed.utils), lambda: trains(settings={"parallel": {"blocks": ["first", "last"]}})),
        Case(("initialize has moved the model to engine.device",), lambda: method("to"), lambda: method("device")),
        Case(("call save_16bit_model or module_state_dict to get the weights",), lambda: method("cpu"), lambda: method("module_state_dict")()),
        Case(('write "bf16": {"enabled": true} or "fp16" in the configuration',), lambda: method("half"), each(lambda kind: trains(settings={kind: {"enabled": True}}), "bf16", "fp16")),
        Case(("build the model again, and call initialize with the new sizes; checkpoints load with other batch sizes",), lambda: method("set_train_batch_size"), lambda: loads(folder, lambda e, f: engine_of(settings=accumulating).load_checkpoint(f)[0] is not None)),
        Case(('"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}',), lambda: method("offload_states"), lambda: resolve(plait.load_config(config(zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}})), world_size=2)),
        Case(('write "compile": {"enabled": true} in the configuration',), lambda: method("compile"), lambda: plait.load_config(config(compile={"enabled": True}))),
        Case(("call engine.eval() and engine(batch)",), lambda: method("eval_batch"), lambda: call(lambda e: (e.eval(), e(X)))),
        Case(("call engine.plait.generate(prompts, ...)",), lambda: engine_of(model=llama()).generate, lambda: engine_of(model=llama()).plait.generate([[1]], max_new_tokens=1)),
        Case(("set it in one of those, or build the model without zero.Init() (enabled=False)",), lambda: built(scale=True), lambda: built(method=True) and built(enabled=False, scale=True)),
        Case(('parameters keep their dtype as master weights; write "bf16": {"enabled": true}',), lambda: deepspeed.zero.Init(dtype=torch.bfloat16), lambda: trains(settings={"bf16": {"enabled": True}})),
        Case(("gather the parameters after it",), lambda: gathers_on_meta(True), lambda: gathers_on_meta(False)),
        Case(("write in place (with torch.no_grad(): engine.module.head.weight.copy_(...))",), lambda: gathered(replace, modifier_rank=0), lambda: gathered(ones, modifier_rank=0)),
        Case(("the change would be lost; pass modifier_rank=0",), lambda: gathered(ones), lambda: gathered(ones, modifier_rank=0)),
        Case(("leave data_sampler out, and use at most 1",), lambda: loader(Stream(), num_local_io_workers=2), lambda: loader(Stream())),
        Case(("pass a torch.utils.data.Dataset, an IterableDataset of torch",), lambda: loader(Rows()), lambda: loader(TensorDataset(X)) and loader(Stream())),
        Case(("keep micro-batch size x data-parallel ranks",), lambda: left_after(3), lambda: left_after(2)),
        Case(("leave it out, or pass an optimizer of your own",), lambda: FusedAdam(net().parameters(), amsgrad=True), lambda: FusedAdam(net().parameters()) and trains(optimizer=lambda p: torch.optim.AdamW(p, amsgrad=True))),
        Case(("states have the dtype of the master weights; leave it out",), lambda: DeepSpeedCPUAdam(net().parameters(), fp32_optimizer_states=False), lambda: DeepSpeedCPUAdam(net().parameters())),
        Case(("call engine.train_batch(iterator) or engine.eval_batch(iterator)",), lambda: pipeline(lambda e: e(X)), lambda: pipeline(full_step(iter(BATCHES))) and pipeline(lambda e: torch.isfinite(e.eval_batch(iter(BATCHES))).item())),
        Case(("pass an iterator, or training_data= to initialize",), lambda: pipeline(full_step(None)), lambda: pipeline(full_step(iter(BATCHES))) and pipeline(full_step(None), data=TensorDataset(X, X))),
        Case(("create `batches = iter(...)` or RepeatingLoader(...) once, and pass it to every call",), lambda: pipeline(full_step(BATCHES)), lambda: pipeline(full_step(iter(BATCHES))) and pipeline(full_step(iter(deepspeed.utils.RepeatingLoader(BATCHES))))),
        Case(("train fewer steps, or pass RepeatingLoader(...)",), lambda: pipeline(full_step(iter(BATCHES[:1]))), lambda: pipeline(full_step(iter(BATCHES))) and pipeline(full_step(iter(deepspeed.utils.RepeatingLoader(BATCHES))))),
        Case(("call it twice for both",), lambda: pipeline(evaluated({"return_logits": True})), lambda: pipeline(evaluated({}, {"compute_loss": False, "reduce_output": None}))),
        Case(("layers are recomputed one by one; use 1",), lambda: pipeline(id, activation_checkpoint_interval=2), lambda: pipeline(full_step(iter(BATCHES)), activation_checkpoint_interval=1)),
        Case(("and stages are balanced by predicted time; leave it out",), lambda: pipeline(id, partition_method="random"), lambda: pipeline(full_step(iter(BATCHES)))),
        Case(("leave them out: layers are initialised by name",), lambda: pipeline(id, seed_layers=True), lambda: pipeline(full_step(iter(BATCHES)))),
        Case(("the PipelineModule has no loss; pass it loss_fn=, a function of (output, labels)",), lambda: pipeline(id, loss_fn=None), lambda: pipeline(full_step(iter(BATCHES)))),
        Case(('write the degrees in the configuration ("parallel": {"pp": 2',), lambda: pipeline(id, topology=object()), lambda: pipeline(full_step(iter(BATCHES)), parallel={"pp": 2}, num_stages=None)),
        Case(("call engine.save_16bit_model",), lambda: pipeline(lambda e: e.module_state_dict()), lambda: pipeline(saved(folder))),
        Case(('pass a tokenizer\'s input_ids as a tensor (return_tensors="pt")',), lambda: generated([[0, 1, 2]]), lambda: generated(prompt)),
        Case(("pass both as the tokenizer made them",), lambda: deepspeed.init_inference(llama()).generate(prompt, attention_mask=prompt[:, 1:]), lambda: deepspeed.init_inference(llama()).generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1)),
        Case(("pass a dict, or the path of a file with a JSON object",), lambda: inference(f"{folder}/gone.json"), lambda: inference({"dtype": "fp32"}) and deepspeed.init_inference(llama(), f"{folder}/inference.json")),
        Case(("differ; pass one of them",), lambda: inference(mp_size=2, tp={"tp_size": 1}), lambda: generated(prompt, mp_size=2) and generated(prompt, tp={"tp_size": 2})),
        Case(("tp_size must be a whole number of at least 1; correct it",), lambda: inference(tp={"tp_size": 0}), lambda: generated(prompt, tp={"tp_size": 1})),
        Case(("use one of fp32, float, fp16, half, bf16, bfloat16",), lambda: inference(dtype="int8"), each(lambda kind: generated(prompt, dtype=kind), "fp32", "bf16")),
        Case(("leave it out, and split all layers, experts included, with tensor_parallel",), lambda: inference(moe=True), lambda: generated(prompt, mixture(), tensor_parallel={"tp_size": 2})),
        Case(("build the model with plait.from_pretrained(folder)",), lambda: inference(checkpoint=folder), lambda: deepspeed.init_inference(plait.from_pretrained(f"{folder}/llama"))),
        Case(("knows no such argument; leave it out",), lambda: distributed(nosuch=1), distributed),
        Case(('write "parallel": {"tp": 2} in config=',), lambda: distributed(device_mesh=object()), lambda: DistributedDataParallel(llama(), config={"train_micro_batch_size_per_gpu": 2, "parallel": {"tp": 2}})),
        Case(('write "bf16": {"enabled": true} in config=',), lambda: distributed(mixed_precision=object()), lambda: distributed({"bf16": {"enabled": True}})),
        Case(('for example from "parallel": {"tp": 2}',), lambda: distributed(process_group=object()), lambda: DistributedDataParallel(llama(), config={"train_micro_batch_size_per_gpu": 2, "parallel": {"tp": 2}})),
        Case(("use plait.parallelize(model, config), sharded.backward or sharded.forward_backward, and sharded.step(optimizer)",), lambda: distributed({"fp16": {"enabled": True}}), own_loop),
        Case(('write "parallel": {"compress_gradients": ...} in config=',), lambda: DistributedDataParallel(net()).register_comm_hook(None, id), lambda: distributed({"parallel": {"compress_gradients": "int8"}})),
    ]  # fmt: skip


def followed(rank, world, folder):
    """Runs in a worker."""
    return failures(of_deepspeed(folder))


def test_deepspeed_advice(pool, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(config()))
    (tmp_path / "inference.json").write_text(json.dumps({"dtype": "fp32"}))
    llama().save_pretrained(tmp_path / "llama")
    first, second = pool.run(2, followed, str(tmp_path))
    assert not first, "\n".join(first)
    assert not second, "\n".join(second)
