"""Scripts in DeepSpeed's style on two processes, against plain torch loops in one, in float64."""

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

WORLD = 2
STEPS = 3
ACCUMULATION = 2
MICRO_BATCH = 2
CLIPPING = 0.3
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
CLIENT_STATE = {"epoch": 3, "shape": (1, 2)}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden):
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        return hidden + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))


class Gpt(nn.Module):
    """A language model that returns its loss, as scripts for DeepSpeed have it."""

    def __init__(self, width=8, vocabulary=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, labels):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gpt():
    torch.manual_seed(1)
    return Gpt().double()


def weight_decay_groups(model):
    """Parameter groups of which biases and norms have no weight decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


def tokens():
    """Token ids of the micro-batches of all ranks."""
    shape = (STEPS, WORLD * ACCUMULATION, MICRO_BATCH, 6)
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(2))


def settings(stage, **sections):
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": stage},
        **sections,
    }


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


def edit_weights(engine, rank, stage):
    """Change weights through `GatheredParameters` and the functions of `deepspeed.utils`."""
    head = engine.module.head.weight
    with deepspeed.zero.GatheredParameters(head, modifier_rank=1), torch.no_grad():
        if rank == 1:
            head[3] = 1.0

    with deepspeed.zero.GatheredParameters(list(engine.module.head.parameters())), torch.no_grad():
        by_data = head.data.cpu()
        by_module = engine.module.head.weight.clone()
        by_state_dict = engine.module.head.state_dict()["weight"].clone()
    assert by_data[3, 0] == 1.0
    for weight in (by_data, by_module, by_state_dict):
        assert type(weight) is torch.Tensor
        assert_equal(weight, by_data)

    if stage:
        gathered = deepspeed.zero.GatheredParameters(head, enabled=stage == 3)
        with pytest.raises(InputError, match="modifier_rank=0"), gathered:
            head.data.zero_()
        with pytest.raises(InputError, match="module_state_dict"):
            torch.save({"head": head.data.cpu()}, io.BytesIO())

    value = deepspeed.utils.safe_get_full_fp32_param(engine.module.embed.weight)
    value[2] = 0.5
    deepspeed.utils.safe_set_full_fp32_param(engine.module.embed.weight, value)


def train(engine, rank, steps):
    """Return losses, norms and the last gradient of a weight."""
    losses = []
    norms = []
    engine.train()
    for step in steps:
        for index, ids in enumerate(step[rank * ACCUMULATION : (rank + 1) * ACCUMULATION]):
            last = index == ACCUMULATION - 1
            assert engine.is_gradient_accumulation_boundary() == last
            loss = engine(ids, ids)
            assert torch.equal(engine.backward(loss), loss.detach() / ACCUMULATION)
            losses.append(loss.item())
            if last:
                weight = engine.module.blocks[1].qkv.weight
                gradient = deepspeed.utils.safe_get_full_grad(weight)
            engine.step()
            assert engine.was_step_applied() == last
        norms.append(engine.get_global_grad_norm())
    return losses, norms, gradient


def check_loading(engine, rank, folder, stage):
    """Load weights alone and checkpoints without optimizer states, and write a 16-bit file."""
    trained = engine.module_state_dict()
    assert engine.save_16bit_model(folder, "model.bin") is True
    if rank == 0:
        assert_equal(dict(torch.load(f"{folder}/model.bin")), trained)

    _, client = engine.load_checkpoint(folder, "global_step1", load_module_only=True)
    assert client == CLIENT_STATE
    assert engine.global_steps == STEPS
    assert not torch.equal(engine.module_state_dict()["head.weight"], trained["head.weight"])
    assert engine.load_state_dict({f"module.{name}": value for name, value in trained.items()})
    assert_equal(engine.module_state_dict()["head.weight"], trained["head.weight"])

    _, client = engine.load_checkpoint(
        folder, load_optimizer_states=False, load_lr_scheduler_states=False
    )
    assert client == CLIENT_STATE
    assert engine.global_steps == 1
    assert not torch.equal(engine.module_state_dict()["head.weight"], trained["head.weight"])
    assert engine.get_lr() == [1e-2, 1e-2]
    assert engine.zero_optimization_stage() == stage
    assert engine.get_batch_info() == (8, 2, 2)


def gpt_script(rank, world, stage, folder):
    """Train, save, resume from the first step, and train again. Runs on every rank."""
    model = gpt()
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=model, model_parameters=weight_decay_groups(model), config=settings(stage, **ADAMW)
    )
    assert loader is None
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    edit_weights(engine, rank, stage)
    assert engine.get_global_grad_norm() is None

    data = tokens()
    losses, norms, _ = train(engine, rank, data[:1])
    assert engine.save_checkpoint(folder, client_state=CLIENT_STATE) is True
    train(engine, rank, data[1:])
    trained = engine.module_state_dict()
    for name, value in engine.state_dict().items():
        assert_equal(value, trained[name.removeprefix("module.")])

    path, client = engine.load_checkpoint(folder)
    assert Path(path).name == "global_step1"
    assert client == CLIENT_STATE
    assert engine.global_steps == 1
    assert engine.load_checkpoint(f"{folder}/none") == (None, None)

    resumed_losses, resumed_norms, gradient = train(engine, rank, data[1:])
    assert engine.global_steps == STEPS
    assert engine.global_samples == STEPS * 8
    assert engine.micro_steps == (2 * STEPS - 1) * ACCUMULATION
    assert_equal(engine.module_state_dict(), trained)
    moment = deepspeed.utils.safe_get_full_optimizer_state(engine.module.head.weight, "exp_avg")
    check_loading(engine, rank, folder, stage)
    return {
        "losses": losses + resumed_losses,
        "norms": norms + resumed_norms,
        "gradient": gradient,
        "moment": moment,
        "weights": trained,
    }


def gpt_reference():
    model = gpt()
    with torch.no_grad():
        model.head.weight[3] = 1.0
        model.embed.weight[2] = 0.5
    optimizer = torch.optim.AdamW(weight_decay_groups(model), lr=1e-2)
    losses = []
    norms = []
    for step in tokens():
        for ids in step:
            loss = model(ids, ids)
            (loss / len(step)).backward()
            losses.append(loss.item())
        gradient = model.blocks[1].qkv.weight.grad.clone()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        optimizer.zero_grad()
    return {
        # [steps, ranks, micro-batches of a rank]
        "losses": torch.tensor(losses, dtype=torch.float64).view(STEPS, WORLD, ACCUMULATION),
        "norms": norms,
        "gradient": gradient,
        "moment": optimizer.state[model.head.weight]["exp_avg"],
        "weights": dict(model.state_dict()),
    }


def image_classifier():
    """Build a small version of the model of DeepSpeed's CIFAR example."""
    torch.manual_seed(4)
    features = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 5)).double()


def images():
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(24, 3, 8, 8, generator=generator).double(),
        torch.randint(0, 5, (24,), generator=generator),
    )


def decaying(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def image_script(rank, world, stage, folder):
    """Run a loop with a client optimizer, a data loader and an LR scheduler. Runs on every rank.

    The first micro-batch of every step is in no_sync, which DeepSpeed refuses at stages 2 and 3.
    """
    model = image_classifier()
    engine, _, loader, scheduler = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        training_data=images(),
        lr_scheduler=decaying,
        config_params=settings(stage),
    )
    assert loader is not None and len(loader) == 24 // world // MICRO_BATCH
    losses = []
    steps = 0
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
            steps += 1
        losses.append(loss.item())
    assert engine.global_steps == steps
    assert scheduler.get_last_lr() == engine.get_lr() == [0.1 / (1 + steps)]

    engine.eval()
    with torch.no_grad():
        outputs = engine(images().tensors[0])
    return {"losses": losses, "weights": engine.module_state_dict(), "outputs": outputs}


def image_reference():
    model = image_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = decaying(optimizer)
    data = images()
    loaders = []
    for rank in range(WORLD):
        sampler = DistributedSampler(data, num_replicas=WORLD, rank=rank)
        loaders.append(DataLoader(data, batch_size=MICRO_BATCH, sampler=sampler))

    losses: list[list[float]] = [[] for _ in loaders]
    for index, micro_batches in enumerate(zip(*loaders, strict=True)):
        for rank, (inputs, labels) in enumerate(micro_batches):
            loss = F.cross_entropy(model(inputs), labels)
            (loss / (ACCUMULATION * WORLD)).backward()
            losses[rank].append(loss.item())
        if index % ACCUMULATION == ACCUMULATION - 1:
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    outputs = model(data.tensors[0]).detach()
    return {"losses": losses, "weights": dict(model.state_dict()), "outputs": outputs}


def both_scripts(rank, world, stage, folder):
    """Runs on every rank."""
    gpt_results = gpt_script(rank, world, stage, f"{folder}/gpt")
    return gpt_results, image_script(rank, world, stage, folder)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_scripts_equal_plain_loops(pool, stage, tmp_path):
    expected_gpt = gpt_reference()
    expected_images = image_reference()
    for rank, (gpt_results, image_results) in enumerate(
        pool.run(WORLD, both_scripts, stage, str(tmp_path))
    ):
        for name in ("norms", "gradient", "moment", "weights"):
            assert_close(gpt_results[name], expected_gpt[name])
        assert_close(gpt_results["losses"], expected_gpt["losses"][:, rank].flatten().tolist())
        assert_close(image_results["losses"], expected_images["losses"][rank])
        assert_close(image_results["weights"], expected_images["weights"])
        assert_close(image_results["outputs"], expected_images["outputs"])


def evaluate_without_optimizer(rank, world):
    """Runs on every rank."""
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=image_classifier(), config=settings(3)
    )
    assert optimizer is None and scheduler is None
    engine.eval()
    with torch.no_grad():
        outputs = engine(images().tensors[0])
    with pytest.raises(InputError, match="given no optimizer"):
        engine.backward(engine(images().tensors[0]).sum())
    return outputs


def test_an_engine_without_optimizer_only_evaluates(pool):
    expected = image_classifier()(images().tensors[0]).detach()
    for outputs in pool.run(WORLD, evaluate_without_optimizer):
        assert_close(outputs, expected)


def losses_through_two_engines(rank, world):
    """Compute losses of one engine's parameters through another's. Runs on every rank."""
    for stage in (0, 2, 3):
        config = settings(stage, **ADAMW)
        generator = deepspeed.initialize(model=nn.Linear(4, 4), config=config)[0]
        discriminator = deepspeed.initialize(model=nn.Linear(4, 1), config=config)[0]
        inputs = torch.ones(1, 4)
        with pytest.raises(InputError, match=r"another engine.*requires_grad_\(False\)"):
            generator.backward(discriminator(generator(inputs)).mean())
        with pytest.raises(InputError, match=r"loss.backward\(\) was called"):
            discriminator(inputs).mean().backward()


def test_a_loss_through_another_engine_is_refused(pool):
    """test_unfreezing.py::test_generator_first follows the remedy."""
    pool.run(WORLD, losses_through_two_engines)


def float16_script(rank, world):
    """Return the norm and the moment of one step at stage 0. Runs on every rank."""
    config = settings(
        0,
        **ADAMW,
        fp16={"enabled": True, "loss_scale": 1024},
        gradient_accumulation_steps=1,
        gradient_clipping=0,
    )
    engine, optimizer, _, _ = deepspeed.initialize(
        model=nn.Linear(4, 1, bias=False).half(), config=config
    )
    weight = engine.module.weight
    assert weight.dtype == torch.float32
    assert engine.loss_scale() == optimizer.loss_scale == 1024
    assert engine.fp16_enabled() and not engine.bfloat16_enabled()

    engine.backward(engine(torch.ones(1, 4)).float().sum())
    assert deepspeed.utils.safe_get_full_grad(weight).tolist() == [[1.0] * 4]
    deepspeed.utils.safe_set_full_grad(weight, torch.ones(1, 4) / 2)
    engine.step()

    file = io.BytesIO()
    torch.save([engine.module.state_dict()["weight"], weight.data.cpu()], file)
    file.seek(0)
    from_state_dict, from_data = torch.load(file)
    assert type(from_state_dict) is type(from_data) is torch.Tensor
    assert_equal(from_state_dict, from_data)
    # DeepSpeed returns the weights on rank 0 only, where scripts write them.
    weights = engine._zero3_consolidated_16bit_state_dict()
    assert (weights is None) == (rank != 0)
    if weights is not None:
        assert weights["weight"].dtype == torch.float16

    moment = deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg")
    deepspeed.utils.safe_set_full_optimizer_state(weight, 2 * moment, "exp_avg")
    assert_equal(deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg"), 2 * moment)
    return engine.get_global_grad_norm() or 0.0, float(moment[0, 0])


def test_float16_at_stage_0_has_the_right_gradients(pool):
    """Gradients are multiplied by the loss scale before they are divided by it.

    DeepSpeed 0.19.8 only divides: it has a norm of 0.00195 and a moment of 9.77e-5.
    """
    for norm, moment in pool.run(WORLD, float16_script):
        assert norm == pytest.approx(1, rel=1e-3)
        assert moment == pytest.approx(0.05, rel=1e-3)


def misuse_engine(rank, world, folder):
    """Return the message about a state dict of shards. Runs on every rank.

    test_deepspeed_advice.py has the other refusals.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=settings(3, **ADAMW))
    weight = model[0].weight
    with (
        pytest.raises(PlaitError, match="replaced"),
        deepspeed.zero.GatheredParameters(weight, modifier_rank=0),
    ):
        model[0].weight = nn.Parameter(torch.ones(4, 4))
    assert model[0].weight is weight, "the shard did not return to the module"
    assert deepspeed.utils.safe_get_full_grad(weight) is None
    engine.backward(engine(torch.ones(1, 4)).sum())
    with pytest.raises(PlaitError) as error:
        engine.module.state_dict()
    engine.step()

    with pytest.warns(UserWarning, match="of 1 micro-batches") if rank == 0 else nullcontext():
        optimizer.zero_grad()
    with pytest.warns(UserWarning, match="different tags") if rank else nullcontext():
        engine.save_checkpoint(folder, tag=float(rank), client_state={"loss": float(rank)})
    assert engine.load_checkpoint(folder, tag=0.0)[1] == {"loss": 0.0}
    return str(error.value)


def test_misuse_is_refused_or_warned_of(pool, tmp_path):
    for message in pool.run(WORLD, misuse_engine, str(tmp_path)):
        assert "module_state_dict()" in message


def pipeline_module():
    torch.manual_seed(6)
    inside = [nn.ReLU(inplace=True), LayerSpec(nn.Linear, 6, 6), nn.ReLU(inplace=True)]
    layers = [LayerSpec(nn.Linear, 4, 6), *inside, LayerSpec(nn.Linear, 6, 2)]
    return PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss()).double()


def samples():
    """Pairs of inputs and targets."""
    draws = torch.Generator().manual_seed(7)
    pairs = []
    for _ in range(6):
        inputs = torch.randn(MICRO_BATCH, 4, generator=draws).double()
        pairs.append((inputs, torch.ones(MICRO_BATCH, 2).double()))
    return pairs


def pipeline_script(rank, world):
    """Return the losses of two training steps and an evaluation. Runs on every rank."""
    engine, _, _, _ = deepspeed.initialize(model=pipeline_module(), config=settings(0, **ADAMW))
    assert (engine.num_stages, engine.stage_id) == (2, rank)
    assert isinstance(engine, deepspeed.PipelineEngine)
    batches = iter(samples())
    losses = [float(engine.train_batch(batches)) for _ in range(2)]
    losses.append(float(engine.eval_batch(batches)))
    outputs = engine.eval_batch(
        iter(samples()), compute_loss=False, reduce_output=None, num_micro_batches=1
    )
    assert (outputs is None) == engine.is_first_stage()
    if outputs is not None:
        assert outputs[0].shape == (MICRO_BATCH, 2)
    return losses


def test_a_pipeline_module_equals_one_process(pool):
    model = pipeline_module()
    batches = iter(samples())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    def mean_loss():
        losses = [F.mse_loss(model(inputs), labels) for inputs, labels in islice(batches, 2)]
        return torch.stack(losses).mean()

    expected = []
    for _ in range(2):
        loss = mean_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    expected.append(mean_loss().item())
    for losses in pool.run(WORLD, pipeline_script):
        # The engine reports losses in float32.
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-6)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "deepspeed-scripts.md"


def run_page(rank, world, folder):
    """Run the code of the how-to guide and return its losses. Runs on every rank."""
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    code = code.replace('"checkpoints"', repr(folder))
    code = code.replace('"weights"', repr(f"{folder}/weights"))
    variables: dict[str, Any] = {}
    exec(code, variables)
    return variables["losses"]


def test_the_guide_trains(pool, tmp_path):
    for losses in pool.run(WORLD, run_page, str(tmp_path)):
        assert sum(losses[-4:]) < sum(losses[:4])
    assert (tmp_path / "LATEST").exists()
    assert (tmp_path / "weights" / "pytorch_model.bin").exists()
