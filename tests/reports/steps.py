"""Reports about the step: accumulation, clipping, optimizers, gradients that a loop changes."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial

import torch
from torch import nn

import plait
from plait.verify.parity import full_tensor_on_cpu
from tests.reports.autograd import BranchNet
from tests.reports.models import Layer, Net, build, inputs
from tests.reports.runs import adamw, plain, sgd

STEPS = 3


def loss_of(call, step, rank, micro=0):
    """The loss of a micro-batch."""
    return call(inputs(step, rank, micro)).square().mean()


def accumulate(run, call, step, count):
    """The backwards of a step of `count` micro-batches."""
    for micro in range(count - 1):
        for rank in run.each_rank():
            with run.accumulating():
                run.backward(loss_of(call, step, rank, micro))
    for rank in run.each_rank():
        run.backward(loss_of(call, step, rank, count - 1))


def clipped_accumulation(run):
    """Gradient norms of accumulated steps, clipped."""
    call = run.start(build(Net), accumulation=3, clipping=0.05)
    for step in range(STEPS):
        accumulate(run, call, step, 3)
        run.step()


def logits_after_accumulated_steps(run):
    """Logits after each step with accumulation."""
    call = run.start(build(Net), accumulation=2)
    for step in range(STEPS):
        accumulate(run, call, step, 2)
        run.step()
        for rank in run.each_rank():
            with torch.no_grad():
                run.note(call(inputs(9, rank)))


def many_groups_of_adam(run):
    """A group per parameter, whose step counts must agree."""

    def grouped(parameters):
        groups = [
            {"params": [p], "lr": 1e-3 * (1 + index % 3)} for index, p in enumerate(parameters)
        ]
        return torch.optim.Adam(groups, betas=(0.5, 0.7))

    call = run.start(build(Net), grouped)
    run.train(partial(loss_of, call))


def groups_of(parameters):
    """Vectors without decay, matrices with another rate."""
    thin = [p for p in parameters if p.ndim == 1]
    wide = [p for p in parameters if p.ndim != 1]
    groups = [{"params": thin, "weight_decay": 0.0}, {"params": wide, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.2)


def resumed_with_groups(rank, world, stage, folder):
    """Four steps, of which the last two are another engine's. Runs on every rank."""
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    for part in range(2):
        model = build(Net)
        engine = plait.initialize(model, {**config, "gradient_clipping": 0}, optimizer=groups_of)
        if part:
            assert engine.load_checkpoint(folder) is not None
        for step in range(2 * part, 2 * part + 2):
            engine.backward(loss_of(engine, step, rank))
            engine.step()
        if not part:
            engine.save_checkpoint(folder)
        weights = {name: full_tensor_on_cpu(p) for name, p in model.named_parameters()}
        engine.close()
    return weights


def uninterrupted_with_groups(world):
    """Run the same steps in one process."""
    model = build(Net)
    optimizer = groups_of(list(model.parameters()))
    for step in range(4):
        for rank in range(world):
            (loss_of(model, step, rank) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def static_graph(rank, world):
    """Torch's wrapper with a static graph, by its import from Plait. Runs on every rank."""
    from plait.compat.torch import DistributedDataParallel

    model = build(Net)
    wrapped = DistributedDataParallel(model, static_graph=True)
    optimizer = adamw(list(model.parameters()))
    weights = []
    for step in range(STEPS):
        with wrapped.no_sync():
            (loss_of(wrapped, step, rank, 0) / 2).backward()
        (loss_of(wrapped, step, rank, 1) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: full_tensor_on_cpu(p) for name, p in model.named_parameters()})
    return weights


def accumulated_twice(run):
    """Two micro-batches per step, of which the first is not reduced."""
    call = run.start(build(Net), accumulation=2)
    for step in range(STEPS):
        accumulate(run, call, step, 2)
        run.step()


def groups_with_a_schedule(run):
    """Three groups with other rates and decays, an empty one, a schedule, clipping."""

    def grouped(parameters):
        thin = [p for p in parameters if p.ndim == 1]
        wide = [p for p in parameters if p.ndim != 1]
        return torch.optim.AdamW(
            [
                {"params": wide[:2], "lr": 1e-2, "weight_decay": 0.3},
                {"params": wide[2:], "lr": 2e-3},
                {"params": thin, "lr": 5e-3, "weight_decay": 0.0},
                {"params": []},
            ],
            lr=1e-3,
        )

    call = run.start(build(Net), grouped, accumulation=2, clipping=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        run.optimizer, [lambda s, k=k: 1 / (1 + s * k) for k in range(4)]
    )
    for step in range(STEPS):
        accumulate(run, call, step, 2)
        run.step()
        schedule.step()
        run.note([group["lr"] for group in run.optimizer.param_groups], everywhere=True)


def weights_read_through_the_groups(run):
    """The norm of the weights that the optimizer's groups hold."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        run.step()
        for group in run.optimizer.param_groups:
            squares = [plain(p.detach()).square().sum() for p in group["params"]]
            run.note(torch.stack(squares).sum().sqrt(), everywhere=True)


class LayerWise(torch.optim.Optimizer):
    """LAMB without moments: each tensor moves by a share of its own norm."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trust = (parameter.norm() + 1e-3) / (parameter.grad.norm() + 1e-6)
                    parameter.sub_(parameter.grad * trust * group["lr"])


def layer_wise_optimizer(run):
    """An optimizer that reads norms of whole tensors."""
    call = run.start(build(Net), lambda parameters: LayerWise(parameters, 0.05))
    run.train(partial(loss_of, call))


def own_clipping(run):
    """The loop calls torch's `clip_grad_norm_` itself."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        norm = nn.utils.clip_grad_norm_(run.module.parameters(), 0.05)
        run.note(plain(norm), everywhere=True)
        run.step()


def clipping_by_value(run):
    """The loop calls torch's `clip_grad_value_` itself."""
    call = run.start(build(Net), sgd)
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        nn.utils.clip_grad_value_(run.module.parameters(), 0.01)
        run.step()


def adaptive_clipping(run):
    """Adaptive gradient clipping: each gradient against the norm of its parameter."""
    call = run.start(build(Net), sgd)
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        with torch.no_grad():
            for parameter in run.module.parameters():
                limit = 0.01 * parameter.norm().clamp(min=1e-3)
                norm = parameter.grad.norm()
                parameter.grad.mul_((limit / norm.clamp(min=1e-9)).clamp(max=1.0))
        run.step()


def gradients_masked(run):
    """Gradients of pruned weights are set to zero between backward and step."""
    model = build(Net)
    with torch.no_grad():
        for block in model.blocks:
            block.linear.weight.mul_(block.linear.weight > 0)
    call = run.start(model, sgd)
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        with torch.no_grad():
            for block in run.module.blocks:
                weight = block.linear.weight
                weight.grad.mul_(weight != 0)
        run.step()
    for block in run.module.blocks:
        run.note((plain(block.linear.weight.detach()) == 0).sum(), everywhere=True)


def gradients_combined_by_the_loop(run):
    """Gradients of two losses are projected onto one another, as PCGrad does."""
    call = run.start(build(Net), sgd)
    for step in range(STEPS):
        parameters = list(run.module.parameters())
        gradients = []
        for micro in range(2):
            for rank in run.each_rank():
                run.backward(loss_of(call, step, rank, micro))
            gradients.append([p.grad.clone() for p in parameters])
            run.optimizer.zero_grad()
        for parameter, first, second in zip(parameters, *gradients, strict=True):
            product = (plain(first) * plain(second)).sum()
            share = float(product / plain(second).square().sum().clamp(min=1e-12))
            parameter.grad = first - second * min(share, 0.0) + second
        run.step()


def parameters_frozen_and_thawed(run):
    """Alternating blocks train, and one parameter is frozen for a step."""
    call = run.start(build(Net))
    for step in range(4):
        for index, block in enumerate(run.module.blocks):
            block.requires_grad_((index + step) % 2 == 0)
        run.module.head.bias.requires_grad_(step != 1)
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        run.step()


def two_optimizers_in_turn(run):
    """Two optimizers, each with its own loss, while the other's parameters are frozen."""
    call = run.start(build(Net))
    parts = [[*run.module.stem.parameters(), *run.module.blocks.parameters()]]
    parts.append(list(run.module.head.parameters()))
    optimizers = [adamw(parts[0]), sgd(parts[1])]
    for step in range(4):
        chosen = step % 2
        for index, part in enumerate(parts):
            for parameter in part:
                parameter.requires_grad_(index == chosen)
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        run.optimizer = optimizers[chosen]
        run.step()


def hooks_after_accumulation(run):
    """Hooks that run after each parameter's gradient has been accumulated."""
    call = run.start(build(Net), sgd)
    norms: dict[str, list[float]] = {}
    for name, parameter in run.module.named_parameters():

        def keep(parameter, name=name):
            norms.setdefault(name, []).append(1.0)

        parameter.register_post_accumulate_grad_hook(keep)
    for step in range(2):
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        run.step()
    assert sorted(norms) == sorted(name for name, _ in run.module.named_parameters())


def scaler_of_the_loop(run):
    """The loop's own GradScaler; one rank overflows in the second step."""
    call = run.start(build(Net))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        for rank in run.each_rank():
            loss = loss_of(call, step, rank)
            if step == 1 and rank == 1:
                loss = loss * float("inf")
            run.backward(scaler.scale(loss))
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        run.record()
        run.note(scaler.get_scale(), everywhere=True)


def weights_clamped_after_the_step(run):
    """A Wasserstein critic: weights are clamped after every step."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        run.step()
        with torch.no_grad():
            for parameter in run.module.parameters():
                parameter.clamp_(-0.2, 0.2)


def weights_loaded_between_steps(run):
    """Weights are averaged with a copy of earlier ones, as Lookahead does."""
    call = run.start(build(Net))
    slow = [p.detach().clone() for p in run.module.parameters()]
    for step in range(4):
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        run.step()
        if step % 2:
            with torch.no_grad():
                for parameter, average in zip(run.module.parameters(), slow, strict=True):
                    average.lerp_(parameter, 0.5)
                    parameter.copy_(average)


def weights_reloaded(run):
    """The loop loads full weights into the model between steps."""
    call = run.start(build(Net))
    saved = {name: value.clone() for name, value in build(Net).state_dict().items()}
    for step in range(STEPS):
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        run.step()
        if step == 1:
            run.module.load_state_dict(saved)


def optimizer_built_before_sharding(run):
    """The optimizer is built over the parameters of the model that is sharded afterwards."""
    model = build(Net)
    optimizer = adamw(list(model.parameters()))
    call = run.start(model, lambda parameters: optimizer)
    run.train(partial(loss_of, call))


def three_backwards_per_step(run):
    """Three backwards per step, each of which may be reduced."""
    call = run.start(build(Net))
    for step in range(STEPS):
        for micro in range(3):
            for rank in run.each_rank():
                run.backward(loss_of(call, step, rank, micro))
        run.step()


def weights_reloaded_in_bfloat16(run):
    """Weights that are loaded between steps are those that the optimizer goes on from."""
    call = run.start(build(Net).float(), sgd, bf16={"enabled": True})
    saved = {name: value.float() for name, value in build(Net).state_dict().items()}
    for step in range(4):
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank).float()).float().square().mean())
        run.step()
        if step == 2:
            run.module.load_state_dict(saved)


class Interrupted(Exception):
    """An error that a loop catches before it takes the next batch."""


def raise_interrupted(_gradient):
    """A hook on the gradient of an activation."""
    raise Interrupted


class FailingNet(Net):
    """A model whose middle block fails on request.

    Attributes:
        failing: "forward", "backward", or nothing.
    """

    failing = ""

    def __init__(self):
        super().__init__()
        self.blocks[1].register_forward_hook(self._fail)

    def _fail(self, _module, _inputs, output):
        if self.failing == "forward":
            raise Interrupted
        if self.failing == "backward":
            output.register_hook(raise_interrupted)


def skip_step_of_failed_backward(run, failing, *, evaluate=False):
    """The loop catches an error of all ranks, drops the gradients and takes the next batch.

    Args:
        run: The run.
        failing: Step and micro-batch whose backward fails.
        evaluate: Whether a forward without gradients follows.
    """
    model = build(FailingNet)
    call = run.start(model, accumulation=2)
    for step in range(4):
        try:
            for micro in range(2):
                with run.accumulating() if micro == 0 else nullcontext():
                    for rank in run.each_rank():
                        # In one process the ranks of a micro-batch take turns.
                        is_last = rank == run.ranks[-1]
                        fails = (step, micro) == failing and is_last
                        model.failing = "backward" if fails else ""
                        run.backward(loss_of(call, step, rank, micro))
        except Interrupted:
            run.drop()
            model.failing = ""
            with torch.no_grad():
                if evaluate:
                    run.note(loss_of(call, step, 0), everywhere=True)
            continue
        run.step()


def reduced_backward_fails(run):
    """The backward of a step's last micro-batch fails."""
    skip_step_of_failed_backward(run, (1, 1))


def accumulating_backward_fails(run):
    """The backward of a micro-batch that is not its step's last fails."""
    skip_step_of_failed_backward(run, (1, 0))


def first_backward_fails(run):
    """The backward fails before any step."""
    skip_step_of_failed_backward(run, (0, 0))


def evaluation_after_failed_backward(run):
    """The loop evaluates after a failed backward, and then takes the next batch."""
    skip_step_of_failed_backward(run, (1, 1), evaluate=True)


def step_after_failed_backward(run):
    """The loop ignores the error and steps."""
    model = build(FailingNet)
    call = run.start(model)
    model.failing = "backward"
    for rank in run.each_rank():
        with suppress(Interrupted):
            run.backward(loss_of(call, 0, rank))
    run.step()


def repeat_failed_forward(run):
    """The loop catches an error in a forward and repeats the micro-batch."""
    model = build(FailingNet)
    call = run.start(model, accumulation=2)
    for step in range(4):
        model.failing = "forward"
        with suppress(Interrupted):
            loss_of(call, step, run.ranks[0])
        model.failing = ""
        for rank in run.each_rank():
            with run.accumulating():
                run.backward(loss_of(call, step, rank))
        model.failing = "forward"
        with suppress(Interrupted):
            loss_of(call, step, run.ranks[0], 1)
        model.failing = ""
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank, 1))
        run.step()


def group_added_later(run):
    """A block is thawed and its parameters are added to the optimizer as a group."""
    model = build(Net)
    model.blocks[1].requires_grad_(False)
    call = run.start(model, lambda ps: adamw([p for p in ps if p.requires_grad]))
    for step in range(4):
        if step == 2:
            run.module.blocks[1].requires_grad_(True)
            added = list(run.module.blocks[1].parameters())
            run.optimizer.add_param_group({"params": added, "lr": 5e-3})
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        run.step()


def states_dropped(run):
    """Moments are dropped and scaled in the middle of a run, as ReLoRA does."""
    call = run.start(build(Net))
    for step in range(4):
        for rank in run.each_rank():
            run.backward(loss_of(call, step, rank))
        run.step()
        if step == 1:
            run.optimizer.state.clear()
        if step == 2:
            for state in run.optimizer.state.values():
                state["exp_avg"].mul_(0.1)


def closure_of_lbfgs(run):
    """L-BFGS calls its closure several times per step."""
    call = run.start(build(Net), lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3))
    for step in range(2):

        def closure(step=step):
            run.optimizer.zero_grad()
            losses = []
            for rank in run.each_rank():
                loss = loss_of(call, step, rank)
                run.backward(loss)
                losses.append(loss.detach())
            return torch.stack(losses).mean()

        run.optimizer.step(closure)
        run.optimizer.zero_grad()
        run.record()


def factored_optimizer(run):
    """Adafactor keeps means over rows and columns."""
    call = run.start(build(Net), lambda ps: torch.optim.Adafactor(ps, lr=1e-2))
    run.train(partial(loss_of, call))


def gradients_zeroed_in_place(run):
    """Gradients are zeroed, not dropped, and a block is left out of later steps."""
    call = run.start(build(BranchNet))
    for step in range(4):
        for rank in run.each_rank():
            run.backward(call(inputs(step, rank), step < 2).square().mean())
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        run.record()


class CountingLayer(Layer):
    """A layer that counts its training forwards in a state of its own, and scales by the count."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, hidden):
        self.count += int(self.training)
        return super().forward(hidden) / (1 + 0.1 * self.count)

    def get_extra_state(self):
        return {"count": self.count, "name": "counter"}

    def set_extra_state(self, state):
        self.count = state["count"]


def resumed_with_extra_state(rank, world, stage, folder):
    """Weights of four steps, the last two after a checkpoint was loaded. Runs on every rank."""
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}

    def steps(engine, first):
        for step in (first, first + 1):
            engine.backward(engine(inputs(step, rank)).square().mean())
            engine.step()
        return {n: full_tensor_on_cpu(p) for n, p in engine.model.named_parameters()}

    engine = plait.initialize(build(Net, CountingLayer), config, optimizer=adamw)
    steps(engine, 0)
    engine.save_checkpoint(folder)
    expected = steps(engine, 2)
    engine.close()
    engine = plait.initialize(build(Net, CountingLayer), config, optimizer=adamw)
    engine.load_checkpoint(folder)
    actual = steps(engine, 2)
    engine.close()
    return expected, actual
