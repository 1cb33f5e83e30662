"""Advice of messages works: each case makes a mistake and then follows the message.

The cases of one table run in one task of the workers, because their engines are tiny.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import plait
from tests.advice import Case, each, failures
from tests.parity import cases, pipelines, trainers
from tests.parity.data_parallel import settings

LOSS = plait.causal_lm_loss


def batch():
    ids = torch.arange(16).reshape(2, 8)
    return {"input_ids": ids, "labels": ids}


def plain():
    torch.manual_seed(0)
    return cases.PlainModel(tied=False)


def engine_of(model, **overrides):
    return plait.initialize(model, settings(2, 1, 1, 1, **overrides), loss_fn=LOSS)


def trains(engine, batches=None):
    """Train two steps, and return whether the second has a smaller loss."""
    losses = [engine.train_batch(batches or batch()).loss for _ in range(2)]
    return bool(losses[1] < losses[0])


def changed(change):
    """Return a function that trains a model after a change."""

    def train():
        model = plain()
        change(model)
        return trains(engine_of(model))

    return train


class Pair(nn.Module):
    """Two blocks in one module."""

    def __init__(self, first, second):
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, hidden, use_side):
        return self.second(self.first(hidden, use_side), use_side)


def tie_blocks(model):
    model.blocks[1].up.weight = model.blocks[0].up.weight


def tie_in_one_block():
    model = plain()
    tie_blocks(model)
    model.blocks = nn.ModuleList([Pair(model.blocks[0], model.blocks[1]), model.blocks[2]])
    return trains(engine_of(model, parallel={"dp_shard": 2, "blocks": ["blocks.0"]}))


def set_norm(weight):
    def change(model):
        model.blocks[0].norm.weight = nn.Parameter(weight)

    return change


def hook_afterwards():
    engine = engine_of(plain())
    norms = []
    weight = engine.model.head.weight
    weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.full_tensor().norm()))
    engine.train_batch(batch())
    return len(norms) == 1 and bool(norms[0] > 0)


def add_empty(model, trained=True):
    model.nothing = nn.Parameter(torch.zeros(0, 3), requires_grad=trained)


def share_memory(model):
    model.head.weight = nn.Parameter(model.embed.weight.detach())


def share_parameter(model):
    model.head.weight = model.embed.weight


def with_own_optimizer(function):
    model = plain()
    optimizer = cases.adamw(list(model.parameters()))
    model(batch()["input_ids"]).logits.sum().backward()
    optimizer.step()
    config = settings(2, 1, 1, 1)
    del config["optimizer"]
    argument = cases.adamw if function else optimizer
    return trains(plait.initialize(model, config, optimizer=argument, loss_fn=LOSS))


def with_adagrad(function):
    """Pass an optimizer that has states from its construction."""
    model = plain()
    config = settings(2, 1, 1, 1)
    del config["optimizer"]
    build = partial(torch.optim.Adagrad, lr=0.01)
    optimizer: Any = build if function else build(model.parameters())
    return trains(plait.initialize(model, config, optimizer=optimizer, loss_fn=LOSS))


class ScaledLoss(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, output, batch):
        total, weight = LOSS(output, batch)
        return total * self.scale.sum(), weight


def with_trained_loss(inside):
    model = plain()
    loss = ScaledLoss()
    if inside:
        model.loss = loss
    config = settings(2, 1, 1, 1)
    engine = plait.initialize(model, config, loss_fn=plait.WeightedLoss(loss, LOSS.weight))
    return trains(engine) and bool(loss.scale.full_tensor() < 1)


def plateau(over_the_engine):
    if not over_the_engine:
        config = settings(2, 1, 1, 1)
        plait.initialize(plain(), config, loss_fn=LOSS, lr_scheduler=ReduceLROnPlateau)
    engine = engine_of(plain())
    schedule = ReduceLROnPlateau(engine.optimizer, patience=0)
    for _ in range(2):
        engine.train_batch(batch())
        schedule.step(1.0)
    return all(group["lr"] < 1e-3 for group in engine.optimizer.param_groups)


class WithExtra(cases.PlainModel):
    """A model with one more layer, which may be frozen for a while."""

    def __init__(self):
        super().__init__(tied=False)
        self.extra = nn.Linear(cases.VOCABULARY, cases.VOCABULARY)

    def forward(self, input_ids):  # type: ignore[override]
        return cases.Output(self.extra(super().forward(input_ids).logits))


def add_a_layer():
    model = plain()
    engine = engine_of(model)
    extra = nn.Linear(3, 3)
    extra(torch.ones(3)).sum().backward()
    engine.optimizer.add_param_group({"params": list(extra.parameters())})
    engine.train_batch(batch())


def freeze_a_layer():
    engine = engine_of(WithExtra())
    extra = engine.model.extra
    before = extra.bias.full_tensor()
    extra.requires_grad_(False)
    engine.train_batch(batch())
    frozen = extra.bias.full_tensor()
    extra.requires_grad_(True)
    engine.train_batch(batch())
    return torch.equal(before, frozen) and not torch.equal(frozen, extra.bias.full_tensor())


def weighted_backward(before):
    parallel = {"dp_shard": 2, "optimizer_in_backward": True, "unused_parameters": False}
    engine = engine_of(plain(), parallel=parallel, gradient_clipping=0.0)
    output = engine(batch()["input_ids"], side=True)
    total, weight = LOSS(output, batch())
    if before:
        engine.backward(total / weight)
    else:
        engine.backward(total, weight=weight)
    engine.step()
    return True


def copied(before):
    model = plain()
    reference = copy.deepcopy(model)
    engine = engine_of(model)
    if not before:
        reference = copy.deepcopy(model)
    engine.train_batch(batch())
    weight = engine.model.head.weight.full_tensor()
    return not torch.equal(reference.head.weight, weight)


def each_way(function):
    """Return calls of a function with False, the mistake, and with True, the remedy."""
    return partial(function, False), partial(function, True)


DATA_PARALLEL = (
    Case(
        (
            "are one parameter in two units",
            "put both modules into one module whose forward"
            " runs both and name that module in parallel.blocks",
        ),
        changed(tie_blocks),
        tie_in_one_block,
    ),
    Case(
        ("is an expanded tensor", "nn.Parameter(tensor.clone())"),
        changed(set_norm(torch.ones(1).expand(12))),
        changed(set_norm(torch.ones(1).expand(12).clone())),
    ),
    Case(
        (
            "has a hook on its gradient",
            "call register_post_accumulate_grad_hook on the parameters of the sharded model",
        ),
        changed(lambda model: model.head.weight.register_hook(lambda gradient: gradient)),
        hook_afterwards,
    ),
    Case(
        ("has no elements", "call requires_grad_(False) on it"),
        changed(add_empty),
        changed(lambda model: add_empty(model, trained=False)),
    ),
    Case(
        ("are two tensors in the same memory", "make them one parameter"),
        changed(share_memory),
        changed(share_parameter),
    ),
    Case(
        ("must have one dtype", "convert one of them"),
        changed(lambda model: model.blocks[1].norm.double()),
        changed(lambda model: model.blocks[1].norm.double().float()),
    ),
    Case(
        ("already holds state of the unsharded", "pass a function of the parameters"),
        *each_way(with_own_optimizer),
    ),
    Case(
        ("already holds state of the unsharded", "pass a function of the parameters"),
        *each_way(with_adagrad),
    ),
    Case(
        ("has a trainable parameter, `scale`", "model.loss = loss, before plait.initialize"),
        *each_way(with_trained_loss),
    ),
    Case(
        ("ReduceLROnPlateau follows a metric", "build it over engine.optimizer"),
        *each_way(plateau),
    ),
    Case(
        (
            "the optimizer has a parameter of shape (3, 3)",
            "add all modules before that call, and freeze",
        ),
        add_a_layer,
        freeze_a_layer,
    ),
    Case(("backward(weight=...) divides", "divide the loss before"), *each_way(weighted_backward)),
    Case(
        ("copy.deepcopy of PlainModel", "copy the model before plait.initialize"),
        *each_way(copied),
    ),
)


class AuxiliaryBlock(cases.Block):
    """A block with its own loss, as an attribute and as an output."""

    def forward(self, hidden, loss):  # type: ignore[override]
        output = super().forward(hidden, False)
        self.loss = output.square().mean()
        return output, loss + self.loss


class AuxiliaryModel(nn.Module):
    """A model that passes the losses from block to block."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(cases.VOCABULARY, 12)
        self.blocks = nn.ModuleList(AuxiliaryBlock(12) for _ in range(4))
        self.head = nn.Linear(12, cases.VOCABULARY)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        loss = hidden.new_zeros(())
        for block in self.blocks:
            hidden, loss = block(hidden, loss)
        return {"logits": self.head(hidden), "auxiliary": loss}


def with_auxiliary(passed):
    model = AuxiliaryModel()

    def loss(output, batch):
        total, weight = LOSS(cases.Output(output["logits"]), batch)
        if passed:
            return total + output["auxiliary"], weight
        return total + sum(block.loss for block in model.blocks), weight

    config = pipelines.settings(0, 2, pp=2)
    engine = plait.initialize(model, config, loss_fn=plait.WeightedLoss(loss, LOSS.weight))
    return trains(engine, [batch(), batch()])


class Watchful(cases.PlainModel):
    """A model whose forward reads a value that no run without weights can know."""

    def forward(self, input_ids):  # type: ignore[override]
        hidden = self.embed(input_ids)
        if hidden.data_ptr() == 0:
            raise RuntimeError("the storage of the tensor is not allocated")
        return self.answer(hidden)

    def answer(self, hidden):
        for block in self.blocks:
            hidden = block(hidden, False)
        return cases.Output(self.head(hidden))


def with_own_forward(passed):
    torch.manual_seed(0)
    model = Watchful(tied=False, layers=2)
    options: Any = {}
    if passed:
        options["forward"] = lambda model, batch: model.answer(model.embed(batch["input_ids"]))
    config = pipelines.settings(0, 2, pp=2)
    engine = plait.initialize(model, config, loss_fn=LOSS, **options)
    return trains(engine, [batch(), batch()])


def run_copy(before):
    """Run a copy of a model, made before or after it was split into stages."""
    torch.manual_seed(0)
    model = cases.PlainModel(tied=False, layers=2)
    copied_model = copy.deepcopy(model)
    engine = plait.initialize(model, pipelines.settings(0, 2, pp=2), loss_fn=LOSS)
    engine.train_batch([batch(), batch()])
    if not before:
        copied_model = copy.deepcopy(engine.model)
        copied_model(batch()["input_ids"])
    sharded = plait.parallelize(copied_model, {"train_micro_batch_size_per_gpu": 2})
    return sharded.predict(batch()).logits.shape[0] == 2


def train_two_blocks(schedule):
    torch.manual_seed(0)
    model = cases.PlainModel(tied=False, layers=2)
    engine = plait.initialize(model, pipelines.settings(0, 2, schedule, pp=2), loss_fn=LOSS)
    return trains(engine, [batch(), batch()])


class Annealed(cases.PlainModel):
    """A model whose temperature falls, in the forward or between steps."""

    def __init__(self, in_forward):
        torch.manual_seed(0)
        super().__init__(tied=False, layers=2)
        self.in_forward = in_forward
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, input_ids):  # type: ignore[override]
        hidden = self.embed(input_ids) * self.temperature
        for block in self.blocks:
            hidden = block(hidden, False)
        if self.in_forward:
            self.temperature.mul_(0.5)
        return cases.Output(self.head(hidden))


def annealed(in_forward):
    model = Annealed(in_forward)
    engine = plait.initialize(model, pipelines.settings(0, 2, pp=2), loss_fn=LOSS)
    losses = []
    for _ in range(2):
        losses.append(float(engine.train_batch([batch(), batch()]).loss))
        model.temperature.mul_(0.5)

    # With the weights after one step, one process has the loss of another temperature.
    model = Annealed(in_forward)
    optimizer = cases.adamw(list(model.parameters()))
    for loss in losses:
        total, weight = LOSS(model(batch()["input_ids"]), batch())
        if abs(float(total.detach() / weight) - loss) > 1e-4:
            return False
        (total / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        model.temperature.mul_(0.5)
    return True


PIPELINES = (
    Case(
        (
            "the loss cannot be computed from only",
            "return the values that the loss needs from every block and in the model's output",
        ),
        *each_way(with_auxiliary),
    ),
    Case(
        (
            "the schedule has 4 stages with at least one block each",
            'use "1f1b", which has one stage per rank',
        ),
        partial(train_two_blocks, "zbv"),
        partial(train_two_blocks, "1f1b"),
    ),
    Case(
        ("cannot be traced without weights", "pass forward=, a function of (model, batch)"),
        *each_way(with_own_forward),
    ),
    Case(
        ("this is a copy of a module that was split", "copy the model before plait.initialize"),
        *each_way(run_copy),
    ),
    Case(
        ("changes the buffer temperature after", "change it before the first block or between two"),
        partial(annealed, True),
        partial(annealed, False),
    ),
)


def mlp_hook(name):
    """Return whether a hook sees the full output once per call of the model."""
    model = cases.build("llama", tied=False, dtype=torch.float32, device="cpu")
    shapes: list[Any] = []
    module = model.get_submodule(name)
    module.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    config = settings(2, 0, 1, 1, parallel={"dp_replicate": 2, "mlp_tile_tokens": 4})
    engine = plait.initialize(model, config, loss_fn=LOSS)
    return trains(engine) and shapes == [(2, 8, 32)] * 2


TILES = (
    Case(
        ("has a hook, which would receive a tile", "register it on model.layers.0.mlp"),
        partial(mlp_hook, "model.layers.0.mlp.up_proj"),
        partial(mlp_hook, "model.layers.0.mlp"),
    ),
)


def renormalised(max_norm, by_frequency=False):
    """Train an embedding whose rows stay short."""
    model = nn.Sequential(nn.Embedding(12, 2, max_norm=max_norm, scale_grad_by_freq=by_frequency))
    engine = plait.initialize(model, settings(2, 2, 1, 1))
    weight = engine.model[0].weight
    for _ in range(2):
        engine.backward((engine(torch.arange(12)) - 3).square().mean())
        engine.step()
        with torch.no_grad():
            weight.div_(weight.norm(dim=1, keepdim=True).clamp(min=1))
    return bool((weight.full_tensor().norm(dim=1) < 1 + 1e-6).all())


def step_with_weights(micro_batches):
    """Run a step of two micro-batches, and pass the weights of some of them to backward."""
    engine = plait.initialize(plain(), settings(2, 1, 1, 2), loss_fn=LOSS)
    for index in range(2):
        total, weight = LOSS(engine(batch()["input_ids"], side=True), batch())
        if index in micro_batches:
            engine.backward(total, weight=weight)
        else:
            engine.backward(total / weight)
    engine.step()


class Encoder(cases.PlainModel):
    """A model whose second forward is a method and a flag."""

    def encode(self, input_ids):
        return self.head(self.embed(input_ids))

    def forward(self, input_ids, encode=False):  # type: ignore[override]
        return self.encode(input_ids) if encode else super().forward(input_ids)


def encoded(by_flag):
    engine = engine_of(Encoder(tied=True))
    ids = batch()["input_ids"]
    shape = engine(ids, encode=True).shape if by_flag else engine.model.encode(ids).shape
    return shape == (2, 8, cases.VOCABULARY)


class BypassesBlocks(cases.PlainModel):
    """A model whose forward may call a module inside each block in place of the block."""

    def forward(self, input_ids, bypasses=True):  # type: ignore[override]
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block.side(hidden) if bypasses else block(hidden, True)
        return cases.Output(self.head(hidden))


def bypassed(bypasses=True, **parallel):
    engine = engine_of(BypassesBlocks(tied=False), parallel={"dp_shard": 2, **parallel})
    return engine(batch()["input_ids"], bypasses=bypasses).logits.requires_grad


def on_another_stage(folder, built_again):
    """Train at ZeRO 1 and go on at ZeRO 3."""
    engine = engine_of(plain())
    engine.train_batch(batch())
    engine.save_checkpoint(folder, tag="one")
    model = engine.model
    if built_again:
        with torch.device("meta"):
            model = plain()
    other = plait.initialize(model, settings(2, 3, 1, 1), loss_fn=LOSS)
    other.load_checkpoint(folder, tag="one")
    same = torch.equal(
        other.model.head.weight.full_tensor(), engine.model.head.weight.full_tensor()
    )
    return same and trains(other)


DIFFERENT_RANKS = (
    Case(
        ("has max_norm = 1", "renormalise the weight between steps"),
        partial(renormalised, 1.0),
        partial(renormalised, None),
    ),
    Case(
        ("use scale_grad_by_freq=False",),
        partial(renormalised, None, True),
        partial(renormalised, None, False),
    ),
    Case(
        ("every backward of a step, on every rank, or for none",),
        partial(step_with_weights, [0]),
        each(step_with_weights, [0, 1], []),
    ),
    Case(
        (
            "Encoder.encode computes with parameters that are shards",
            "call the method from forward()",
        ),
        *each_way(encoded),
    ),
    Case(
        (
            "call the block itself (not its forward()",
            "list the modules that are called in parallel.blocks",
        ),
        bypassed,
        lambda: bypassed(False) and bypassed(blocks=["blocks.*.side"]),
    ),
)


def different_rows(rank):
    """Yield cases in which ranks have different numbers of rows."""
    from plait.hf import Accelerator

    accelerator = Accelerator(cpu=True)
    model = plain()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wide = torch.ones(2, 3 + rank)
    long = torch.ones(2 + rank)

    def backward(function=None):
        loss = model(batch()["input_ids"]).logits.sum()
        (function or torch.Tensor.backward)(loss)

    yield Case(
        ("loss.backward() was called", "accelerator.backward(loss) with plait.hf.Accelerator"),
        backward,
        partial(backward, accelerator.backward),
    )

    def gather_padded():
        padded = accelerator.pad_across_processes(wide, dim=1)
        return accelerator.gather(padded).shape == (4, 4)

    yield Case(
        ("call accelerator.pad_across_processes(tensor, dim=d)",),
        lambda: accelerator.gather(wide),
        gather_padded,
    )
    yield Case(
        ("or use accelerator.gather, whose rows may differ",),
        lambda: accelerator.reduce(long),
        lambda: accelerator.gather(long).shape == (5,),
    )
    accelerator.free_memory()


def all_failures(rank, world, folder):
    """Return the failures of all tables. Runs on every rank."""
    sharded_again = Case(
        ("was already sharded by Plait", "build it again", "and load its checkpoint"),
        *each_way(partial(on_another_stage, folder)),
    )
    result = failures([*DATA_PARALLEL, *PIPELINES, *TILES, *DIFFERENT_RANKS, sharded_again])
    with trainers.launched(rank, world):
        return result + failures(different_rows(rank))


def test_advice_works_when_it_is_followed(pool, tmp_path):
    for messages in pool.run(2, all_failures, str(tmp_path)):
        assert not messages, "\n".join(messages)
