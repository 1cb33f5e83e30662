"""Scripts in DeepSpeed's style on two processes, against the same loops in plain torch in one, in float64."""

from __future__ import annotations

import io
import re
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import plait.compat.deepspeed as deepspeed
from plait.compat.deepspeed.pipe import LayerSpec, PipelineModule
from plait.errors import InputError, PlaitError

WORLD, STEPS, ACCUMULATION, MICRO, CLIPPING = 2, 3, 2, 2, 0.3
Results = dict[str, Any]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Gpt(nn.Module):
    """Returns its loss, as scripts for DeepSpeed have it."""

    def __init__(self, width=8, vocabulary=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gpt():
    torch.manual_seed(1)
    return Gpt().double()


def groups(model):
    """Biases and norms without weight decay."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]


def tokens():
    """Step by step, the micro-batches of all ranks."""
    draw = torch.Generator().manual_seed(2)
    return [
        [torch.randint(0, 16, (MICRO, 6), generator=draw) for _ in range(WORLD * ACCUMULATION)]
        for _ in range(STEPS)
    ]


def settings(stage, **more):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage},
    } | more


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def gpt_script(rank, world, stage, folder):
    """Runs in a worker."""
    model = gpt()
    parameters, config = groups(model), settings(stage, **ADAMW)
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=config
    )
    assert loader is None and [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    head = engine.module.head.weight
    with deepspeed.zero.GatheredParameters(head, modifier_rank=1), torch.no_grad():
        if rank == 1:
            head[3] = 1.0
    with deepspeed.zero.GatheredParameters(list(engine.module.head.parameters())), torch.no_grad():
        copies = [
            head.data.cpu(),
            engine.module.head.weight.clone(),
            engine.module.head.state_dict()["weight"].clone(),
        ]
        assert all(
            type(copy) is torch.Tensor and torch.equal(copy, copies[0]) and copy[3, 0] == 1.0
            for copy in copies
        )
    if stage:
        with (
            pytest.raises(InputError, match="modifier_rank=0"),
            deepspeed.zero.GatheredParameters(head, enabled=stage == 3),
        ):
            head.data.zero_()
        with pytest.raises(InputError, match="module_state_dict"):
            torch.save({"head": head.data.cpu()}, io.BytesIO())
    value = deepspeed.utils.safe_get_full_fp32_param(engine.module.embed.weight)
    value[2] = 0.5
    deepspeed.utils.safe_set_full_fp32_param(engine.module.embed.weight, value)
    found: Results = {"losses": [], "norms": []}
    assert engine.get_global_grad_norm() is None

    def train(steps):
        engine.train()
        for step in steps:
            for index, ids in enumerate(step[rank * ACCUMULATION : (rank + 1) * ACCUMULATION]):
                assert engine.is_gradient_accumulation_boundary() == (index == ACCUMULATION - 1)
                loss = engine(ids, ids)
                assert torch.equal(engine.backward(loss), loss.detach() / ACCUMULATION)
                found["losses"].append(loss.item())
                if engine.is_gradient_accumulation_boundary():
                    found["grad"] = deepspeed.utils.safe_get_full_grad(
                        engine.module.blocks[1].qkv.weight
                    )
                engine.step()
                assert engine.was_step_applied() == (index == ACCUMULATION - 1)
            found["norms"].append(engine.get_global_grad_norm())

    data = tokens()
    train(data[:1])
    assert engine.save_checkpoint(folder, client_state={"epoch": 3, "shape": (1, 2)}) is True
    train(data[1:])
    before = engine.module_state_dict()
    assert all(
        torch.equal(tensor, before[name.removeprefix("module.")])
        for name, tensor in engine.state_dict().items()
    )
    path, client = engine.load_checkpoint(folder)
    assert (
        path is not None
        and Path(path).name == "global_step1"
        and client == {"epoch": 3, "shape": (1, 2)}
    )
    assert engine.global_steps == 1 and engine.load_checkpoint(f"{folder}/none") == (None, None)
    found["losses"], found["norms"] = found["losses"][:ACCUMULATION], found["norms"][:1]
    train(data[1:])
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (
        STEPS,
        STEPS * 8,
        (2 * STEPS - 1) * ACCUMULATION,
    )
    found["weights"] = engine.module_state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in found["weights"].items())
    found["moment"] = deepspeed.utils.safe_get_full_optimizer_state(
        engine.module.head.weight, "exp_avg"
    )
    assert engine.save_16bit_model(folder, "model.bin") is True
    if rank == 0:
        saved = torch.load(f"{folder}/model.bin")
        assert (
            all(torch.equal(saved[name], tensor) for name, tensor in before.items())
            and saved.keys() == before.keys()
        )
    assert (
        engine.load_checkpoint(folder, "global_step1", load_module_only=True)[1] == client
        and engine.global_steps == STEPS
    )
    assert not torch.equal(engine.module_state_dict()["head.weight"], before["head.weight"])
    assert engine.load_state_dict({f"module.{name}": tensor for name, tensor in before.items()})
    assert torch.equal(engine.module_state_dict()["head.weight"], before["head.weight"])
    assert (
        engine.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)[
            1
        ]
        == client
    )
    assert engine.global_steps == 1 and not torch.equal(
        engine.module_state_dict()["head.weight"], before["head.weight"]
    )
    assert (
        engine.get_lr() == [1e-2, 1e-2]
        and engine.zero_optimization_stage() == stage
        and engine.get_batch_info() == (8, 2, 2)
    )
    return found


def gpt_reference():
    model = gpt()
    with torch.no_grad():
        model.head.weight[3], model.embed.weight[2] = 1.0, 0.5
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    found: Results = {"losses": [], "norms": []}
    for step in tokens():
        for ids in step:
            loss = model(ids, ids)
            (loss / len(step)).backward()
            found["losses"].append(loss.item())
        gradient = model.get_parameter("blocks.1.qkv.weight").grad
        assert gradient is not None
        found["grad"] = gradient.clone()
        found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        optimizer.zero_grad()
    found["weights"], found["moment"] = (
        dict(model.state_dict()),
        optimizer.state[model.head.weight]["exp_avg"],
    )
    return found


def net():
    """Of DeepSpeed's CIFAR example, small."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.ReLU(),
        nn.Linear(8, 5),
    ).double()


def images():
    draw = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(24, 3, 8, 8, generator=draw).double(),
        torch.randint(0, 5, (24,), generator=draw),
    )


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def cifar_script(rank, world, stage, folder):
    """Runs in a worker. The first micro-batch of every step is in no_sync, which DeepSpeed refuses at stages 2 and 3."""
    model = net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, _, loader, scheduler = deepspeed.initialize(
        model=model,
        optimizer=sgd,
        training_data=images(),
        lr_scheduler=falling,
        config_params=settings(stage),
    )
    losses, step = [], 0
    assert loader is not None and len(loader) == 24 // world // MICRO
    for index, (inputs, labels) in enumerate(loader):
        last = index % ACCUMULATION == ACCUMULATION - 1
        engine.set_gradient_accumulation_boundary(last)
        if not last:
            with engine.no_sync():
                loss = F.cross_entropy(engine(inputs), labels)
                engine.backward(loss)
        else:
            loss = F.cross_entropy(engine(inputs), labels)
            engine.backward(loss / ACCUMULATION, scale_wrt_gas=False)
            engine.step()
            step += 1
        losses.append(loss.item())
    assert engine.global_steps == step and scheduler.get_last_lr() == engine.get_lr() == [
        0.1 / (1 + step)
    ]
    engine.eval()
    with torch.no_grad():
        outputs = engine(images().tensors[0])
    return {"losses": losses, "weights": engine.module_state_dict(), "outputs": outputs}


def cifar_reference():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = falling(optimizer)
    data = images()
    loaders = [
        DataLoader(
            data, batch_size=MICRO, sampler=DistributedSampler(data, num_replicas=WORLD, rank=r)
        )
        for r in range(WORLD)
    ]
    losses: list[list[float]] = [[] for _ in loaders]
    for index, pieces in enumerate(zip(*loaders, strict=True)):
        for mine, (inputs, labels) in zip(losses, pieces, strict=True):
            loss = F.cross_entropy(model(inputs), labels)
            (loss / (ACCUMULATION * WORLD)).backward()
            mine.append(loss.item())
        if index % ACCUMULATION == ACCUMULATION - 1:
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    return {
        "losses": losses,
        "weights": dict(model.state_dict()),
        "outputs": model(data.tensors[0]).detach(),
    }


def reference_model(rank, world):
    """An engine without an optimizer. Runs in a worker."""
    engine, optimizer, _, scheduler = deepspeed.initialize(model=net(), config=settings(3))
    engine.eval()
    with torch.no_grad():
        outputs = engine(images().tensors[0])
    assert optimizer is None and scheduler is None
    with pytest.raises(InputError, match="given no optimizer"):
        engine.backward(engine(images().tensors[0]).sum())
    return outputs


def both(rank, world, stage, folder):
    """Runs in a worker."""
    return gpt_script(rank, world, stage, f"{folder}/gpt"), cifar_script(rank, world, stage, folder)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_loops(pool, stage, tmp_path):
    """A GPT and a CIFAR loop: losses, norms, a gradient, a moment and weights; checkpoints; edits of gathered parameters."""
    wanted, wanted_cifar = gpt_reference(), cifar_reference()
    for rank, (found, found_cifar) in enumerate(pool.run(WORLD, both, stage, str(tmp_path))):
        for name in ("norms", "grad", "moment", "weights"):
            close(found[name], wanted[name])
        close(
            found["losses"],
            torch.tensor(wanted["losses"], dtype=torch.float64)
            .view(STEPS, WORLD, ACCUMULATION)[:, rank]
            .flatten()
            .tolist(),
        )
        close(found_cifar["losses"], wanted_cifar["losses"][rank])
        close(found_cifar["weights"], wanted_cifar["weights"])
        close(found_cifar["outputs"], wanted_cifar["outputs"])


def test_a_reference_model(pool):
    wanted = net()(images().tensors[0]).detach()
    for outputs in pool.run(WORLD, reference_model):
        close(outputs, wanted)


def pair():
    """(generator, discriminator)."""
    torch.manual_seed(1)
    return tuple(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, size)).double() for size in (4, 1)
    )  # type: ignore[return-value]


def adversarial(rank, world):
    """Weights after two steps, by stage. Runs in a worker."""
    found = []
    for stage in (0, 2, 3):
        config = settings(stage, **ADAMW) | {"gradient_accumulation_steps": 1}
        (made, *_), (judge, *_) = (
            deepspeed.initialize(model=model, config=config) for model in pair()
        )
        with pytest.raises(InputError, match=r"another engine.*requires_grad_\(False\)"):
            made.backward(judge(made(pieces()[0][0])).mean())
        with pytest.raises(InputError, match=r"loss.backward\(\) was called"):
            judge(pieces()[0][0]).mean().backward()
        for noise in pieces()[:4:2]:
            mine = noise[0][rank : rank + 1]
            judge.backward(judge(made(mine).detach()).mean() - judge(mine).mean())
            judge.step()
            judge.module.requires_grad_(False)
            made.backward(judge(made(mine)).mean())
            made.step()
            judge.module.requires_grad_(True)
        found.append((made.module_state_dict(), judge.module_state_dict()))
    return found


def test_a_loss_through_another_engine(pool):
    """It is refused with what to do, and that is one process."""
    made, judge = pair()
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0) for model in (made, judge)
    ]
    for noise, _ in pieces()[:4:2]:
        for index, loss in enumerate(
            (
                lambda z: judge(made(z).detach()).mean() - judge(z).mean(),
                lambda z: judge(made(z)).mean(),
            )
        ):
            loss(noise).backward()
            nn.utils.clip_grad_norm_((judge, made)[index].parameters(), CLIPPING)
            optimizers[1 - index].step()
            made.zero_grad()
            judge.zero_grad()
    for found in pool.run(WORLD, adversarial):
        for weights in found:
            close(weights, (dict(made.state_dict()), dict(judge.state_dict())))


def float16(rank, world):
    """Runs in a worker. DeepSpeed 0.19.8 divides by a scale that it has not multiplied by: a norm of 0.00195 and a moment of 9.77e-5."""
    config = settings(0, **ADAMW, fp16={"enabled": True, "loss_scale": 1024}) | {
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0,
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=nn.Linear(4, 1, bias=False).half(), config=config
    )
    assert engine.module.weight.dtype == torch.float32
    engine.backward(engine(torch.ones(1, 4)).float().sum())
    assert (
        engine.loss_scale(),
        optimizer.loss_scale,
        engine.fp16_enabled(),
        engine.bfloat16_enabled(),
    ) == (1024, 1024, True, False)
    gradient = deepspeed.utils.safe_get_full_grad(engine.module.weight)
    assert gradient is not None and gradient.tolist() == [[1.0] * 4]
    deepspeed.utils.safe_set_full_grad(engine.module.weight, torch.ones(1, 4) / 2)
    engine.step()
    saved = io.BytesIO()
    torch.save([engine.module.state_dict(), engine.module.weight.data.cpu()], saved)
    saved.seek(0)
    state, weight = torch.load(saved)
    assert type(state["weight"]) is type(weight) is torch.Tensor and torch.equal(
        state["weight"], weight
    )
    weights = engine._zero3_consolidated_16bit_state_dict()
    assert (weights is None) == (rank != 0) and (
        weights is None or weights["weight"].dtype == torch.float16
    )
    moment = deepspeed.utils.safe_get_full_optimizer_state(engine.module.weight, "exp_avg")
    deepspeed.utils.safe_set_full_optimizer_state(engine.module.weight, 2 * moment, "exp_avg")
    assert torch.equal(
        deepspeed.utils.safe_get_full_optimizer_state(engine.module.weight, "exp_avg"), 2 * moment
    )
    return engine.get_global_grad_norm() or 0.0, float(moment[0, 0])


def test_float16_at_stage_0_has_the_right_gradients(pool):
    for norm, moment in pool.run(WORLD, float16):
        assert norm == pytest.approx(1, rel=1e-3) and moment == pytest.approx(0.05, rel=1e-3)


def mistakes(rank, world, folder):
    """Runs in a worker."""
    with deepspeed.zero.Init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    said = []

    def refused(call):
        with pytest.raises(PlaitError) as error:
            call()
        said.append(str(error.value))

    def gather(change):
        with (
            deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0),
            torch.no_grad(),
        ):
            change()

    refused(lambda: gather(lambda: None))
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=settings(3, **ADAMW))
    held = model[0].weight
    refused(lambda: gather(lambda: setattr(model[0], "weight", nn.Parameter(torch.zeros(4, 4)))))
    assert model[0].weight is held and deepspeed.utils.safe_get_full_grad(held) is None
    engine.backward(engine(torch.ones(1, 4)).sum())
    refused(lambda: deepspeed.utils.safe_get_full_grad(held))
    refused(lambda: gather(lambda: None))
    refused(optimizer.step)
    refused(engine.plait.optimizer.step)
    refused(lambda: engine.module.state_dict())
    refused(lambda: engine.load_checkpoint(folder))
    engine.step()
    with pytest.warns(UserWarning, match="of 1 micro-batches") if rank == 0 else nullcontext():
        optimizer.zero_grad()
    with pytest.warns(UserWarning, match="different tags") if rank else nullcontext():
        engine.save_checkpoint(f"{folder}/own", tag=float(rank), client_state={"loss": float(rank)})
    assert engine.load_checkpoint(f"{folder}/own", tag=0.0)[1] == {"loss": 0.0}
    return said


def test_mistakes(pool, tmp_path):
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "latest").write_text("global_step5")
    wanted = (
        "on meta",
        "replaced",
        "last micro-batch",
        "between a backward",
        "call engine.step()",
        "call engine.step()",
        "module_state_dict()",
        "plait import",
    )
    for said in pool.run(WORLD, mistakes, str(tmp_path)):
        assert all(words in message for words, message in zip(wanted, said, strict=True)), said


def layered():
    torch.manual_seed(6)
    inside = [nn.ReLU(inplace=True), LayerSpec(nn.Linear, 6, 6), nn.ReLU(inplace=True)]
    layers = [LayerSpec(nn.Linear, 4, 6), *inside, LayerSpec(nn.Linear, 6, 2)]
    return PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss()).double()


def pieces():
    draw = torch.Generator().manual_seed(7)
    return [
        (torch.randn(MICRO, 4, generator=draw).double(), torch.ones(MICRO, 2).double())
        for _ in range(6)
    ]


def piped(rank, world):
    """Runs in a worker."""
    engine, _, _, _ = deepspeed.initialize(model=layered(), config=settings(0, **ADAMW))
    assert (engine.num_stages, engine.stage_id) == (2, rank)
    assert isinstance(engine, deepspeed.PipelineEngine)
    batches = iter(pieces())
    found = [float(engine.train_batch(batches)) for _ in range(2)]
    found.append(float(engine.eval_batch(batches)))
    with pytest.raises(InputError, match="the iterator had 0 left"):
        engine.train_batch(batches)
    with pytest.raises(InputError, match="start from its beginning"):
        engine.train_batch(pieces())  # type: ignore[arg-type]
    outputs = engine.eval_batch(
        iter(pieces()), compute_loss=False, reduce_output=None, num_micro_batches=1
    )
    assert (outputs is None) == engine.is_first_stage() and (
        outputs is None or outputs[0].shape == (MICRO, 2)
    )
    return found


def test_a_pipeline_module(pool):
    model, batches, wanted = layered(), iter(pieces()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def mean():
        return torch.stack(
            [F.mse_loss(model(inputs), labels) for inputs, labels in islice(batches, 2)]
        ).mean()

    for _ in range(2):
        wanted.append(mean())
        wanted[-1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    wanted.append(mean())
    for found in pool.run(WORLD, piped):
        torch.testing.assert_close(found, torch.stack(wanted).tolist(), rtol=0, atol=1e-6)


PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "deepspeed-scripts.md").read_text(
    encoding="utf-8"
)


def page(rank, world, folder):
    """The code of docs/how-to/deepspeed-scripts.md. Runs in a worker."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(
        block.replace('"checkpoints"', repr(folder)).replace(
            '"weights"', repr(f"{folder}/weights")
        ),
        names,
    )
    return names["losses"]


def test_the_page(pool, tmp_path):
    for losses in pool.run(WORLD, page, str(tmp_path)):
        assert sum(losses[-4:]) < sum(losses[:4])
    assert (tmp_path / "LATEST").exists() and (tmp_path / "weights" / "pytorch_model.bin").exists()
