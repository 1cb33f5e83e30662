"""Loops and runs of reports about Accelerate, Transformers and PEFT. Imported by workers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from plait.errors import PlaitError
from tests.parity import adapted, trainers

DTYPE = torch.float64
SAMPLES = 24


def optimizer_of(model):
    """SGD over what is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.2, momentum=0.9)


class Rows(Dataset[Any]):
    """Samples that are looked up one by one or as a batch."""

    def __init__(self, count):
        self.rows = trainers.samples(count)
        for index, row in enumerate(self.rows):
            row["index"] = torch.tensor(index)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        if isinstance(at, list):
            return torch.utils.data.default_collate([self.rows[index] for index in at])
        return self.rows[at]


class Batches(IterableDataset[Any]):
    """A stream of batches of two samples."""

    def __iter__(self):
        rows = Rows(SAMPLES)
        for start in range(0, SAMPLES, 2):
            yield rows[[start, start + 1]]


def single_samples(count=SAMPLES):
    return DataLoader(Rows(count), batch_size=2)


def batch_sampler_as_sampler():
    rows = Rows(SAMPLES)
    return DataLoader(
        rows, sampler=BatchSampler(SequentialSampler(rows), 2, False), batch_size=None
    )


def stream_of_batches():
    return DataLoader(Batches(), batch_size=None)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "samples": single_samples,
    "odd": lambda: single_samples(21),
    "batch sampler": batch_sampler_as_sampler,
    "stream": stream_of_batches,
}


def accelerator_of(dp, accumulation, arguments, config):
    """Plait's Accelerator, or Accelerate's own in one process with as many micro-batches."""
    plugin = arguments.pop("plugin", None)
    count = accumulation if config is not None else accumulation * dp
    if plugin is not None:
        from accelerate.utils import GradientAccumulationPlugin

        arguments["gradient_accumulation_plugin"] = GradientAccumulationPlugin(
            num_steps=count, **plugin
        )
    else:
        arguments["gradient_accumulation_steps"] = count
    data = arguments.pop("data", None)
    if data is not None:
        from accelerate.utils import DataLoaderConfiguration

        arguments["dataloader_config"] = DataLoaderConfiguration(**data)
    if config is not None:
        from plait.hf import Accelerator

        return Accelerator(cpu=True, plait_config=config, **arguments)
    from accelerate import Accelerator as Stock

    return Stock(cpu=True, **arguments)


class Training:
    """A training with an accelerator, and what was seen of it."""

    def __init__(self, dp, accumulation, arguments, config, *loaders):
        self.accelerator = accelerator_of(dp, accumulation, dict(arguments), config)
        model = trainers.model(DTYPE)
        prepared = self.accelerator.prepare(*loaders, model, optimizer_of(model))
        *self.loaders, self.model, self.optimizer = prepared
        self.updates = 0
        self.seen: list[int] = []

    def train_on(self, batch):
        """Train on one micro-batch."""
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(**batch).loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.updates += int(self.accelerator.sync_gradients)

    def see(self, indices):
        """Note the samples of a batch of all ranks."""
        self.seen += self.accelerator.gather_for_metrics(indices).tolist()

    def result(self):
        """End the training. Returns the updates, the samples that were seen, and the weights."""
        weights = self.accelerator.get_state_dict(self.accelerator.unwrap_model(self.model))
        self.accelerator.free_memory()
        return {"updates": self.updates, "seen": sorted(self.seen), "weights": weights}


def accelerate_loop(dp, loader, accumulation, epochs, arguments, config):
    """Train."""
    training = Training(dp, accumulation, arguments, config, LOADERS[loader]())
    for _ in range(epochs):
        for batch in training.loaders[0]:
            indices = batch.pop("index")
            training.train_on(batch)
            training.see(indices)
    return training.result()


def loop_with_evaluation(dp, loader, accumulation, epochs, arguments, config):
    """Train, and evaluate in the middle of an accumulated step."""
    training = Training(dp, accumulation, arguments, config, LOADERS[loader](), single_samples(8))
    batches, evaluation = training.loaders
    for _ in range(epochs):
        for number, batch in enumerate(batches):
            indices = batch.pop("index")
            training.train_on(batch)
            if number == (0 if config is not None else dp - 1):
                for other in evaluation:
                    del other["index"]
                    with torch.no_grad():
                        training.model(**other)
            training.see(indices)
    return training.result()


def loop_over_parts(dp, loader, accumulation, epochs, arguments, config):
    """Train on parts of each batch, each accumulated."""
    training = Training(dp, accumulation, arguments, config, LOADERS[loader]())
    for _ in range(epochs):
        for batch in training.loaders[0]:
            training.see(batch.pop("index"))
            for row in range(2):
                training.train_on({name: tensor[row : row + 1] for name, tensor in batch.items()})
    return training.result()


LOOPS = {
    "plain": accelerate_loop,
    "evaluation": loop_with_evaluation,
    "parts": loop_over_parts,
}


def on_accelerate(dp, loop, *case):
    """The loop with Accelerate in one process."""
    with trainers.launched_alone():
        return LOOPS[loop](dp, *case, None)


def on_plaits_accelerator(rank, world, loop, *case):
    """The loop with Plait's Accelerator. Runs on every rank."""
    with trainers.launched(rank, world):
        try:
            return LOOPS[loop](world, *case)
        except PlaitError as error:
            return f"{type(error).__name__}: {error}"


def rates_after_metrics(accelerator):
    """Rates of a schedule that follows a metric, after each of six equal values."""
    model = trainers.model(DTYPE)
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, single_samples(), schedule
    )
    rates = []
    for _, batch in zip(range(6), loader, strict=False):
        del batch["index"]
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    accelerator.free_memory()
    return rates


def rates_on_plait(rank, world):
    """The rates with Plait's Accelerator. Runs on every rank."""
    with trainers.launched(rank, world):
        return rates_after_metrics(
            accelerator_of(world, 1, {}, {"zero_optimization": {"stage": 2}})
        )


def rates_on_accelerate():
    """The rates with Accelerate in one process."""
    with trainers.launched_alone():
        return rates_after_metrics(accelerator_of(1, 1, {}, None))


def optimizer_prepared_alone(rank, world):
    """The model is left out of `prepare`. Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Accelerator

        accelerator = Accelerator(cpu=True, plait_config={"zero_optimization": {"stage": 3}})
        model = trainers.model(DTYPE)
        try:
            accelerator.prepare(optimizer_of(model), single_samples())
        except PlaitError as error:
            return str(error)
        return ""


def scale_after_loading(rank, world, folder):
    """Loss scales of a run in float16, and of its continuation. Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Accelerator

        config = {
            "zero_optimization": {"stage": 3},
            "fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 2},
        }

        def prepared():
            accelerator = Accelerator(cpu=True, plait_config=config, mixed_precision="fp16")
            model = trainers.model(torch.float32)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            return (accelerator, *accelerator.prepare(model, optimizer, single_samples()))

        def steps(accelerator, model, optimizer, batches):
            scales = []
            for batch in batches:
                del batch["index"]
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                scales.append(float(accelerator.engine.sharded.loss_scale))
            return scales

        accelerator, model, optimizer, batches = prepared()
        micro_batches = [batch for _, batch in zip(range(5), batches, strict=False)]
        steps(accelerator, model, optimizer, [dict(batch) for batch in micro_batches[:3]])
        accelerator.save_state(folder)
        scale = float(accelerator.engine.sharded.loss_scale)
        expected = [
            scale,
            *steps(accelerator, model, optimizer, [dict(b) for b in micro_batches[3:]]),
        ]
        accelerator.free_memory()
    with trainers.launched(rank, world):
        accelerator, model, optimizer, _ = prepared()
        accelerator.load_state(folder)
        scale = float(accelerator.engine.sharded.loss_scale)
        actual = [
            scale,
            *steps(accelerator, model, optimizer, [dict(b) for b in micro_batches[3:]]),
        ]
        accelerator.free_memory()
        return expected, actual


# The Trainer


class WithoutItems:
    """Makes a model whose forward does not take `num_items_in_batch`."""

    def __call__(self, dtype=torch.float32):
        model = trainers.model(dtype)
        model.accepts_loss_kwargs = False
        return model


def qwen(dtype=torch.float32):
    """A Qwen 2, whose projections have biases."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model("qwen2", **trainers.SHAPE)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def with_trained_biases(dtype=torch.float32):
    """Adapters that train the biases of their layers too."""
    from peft import LoraConfig, get_peft_model

    base = qwen(dtype)
    torch.manual_seed(11)
    targets = ["q_proj", "v_proj"]
    config = LoraConfig(r=4, target_modules=targets, bias="lora_only", task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def with_adapter(kind, dtype=torch.float32, **fields):
    """A model with an adapter of another kind than LoRA."""
    import peft

    torch.manual_seed(11)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **fields)
    return peft.get_peft_model(trainers.model(dtype), config).to(dtype)


def with_vera(dtype=torch.float32):
    """Vectors for two projections that all layers share, which the file has too."""
    fields = {"r": 4, "target_modules": ["q_proj", "up_proj"], "save_projection": True}
    return with_adapter("VeraConfig", dtype, **fields)


def with_adalora(dtype=torch.float32):
    """Adapters with a penalty on all of their weights in the loss."""
    schedule = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "total_step": 8}
    targets = ["q_proj", "v_proj"]
    model = with_adapter("AdaLoraConfig", dtype, target_modules=targets, **schedule)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_E" in name:
                parameter.normal_(std=0.3, generator=draw)
    return model


MODELS: dict[str, Callable[..., Any]] = {
    "adalora": with_adalora,
    "prompts": partial(with_adapter, "PromptTuningConfig", num_virtual_tokens=4),
    "prefixes": partial(with_adapter, "PrefixTuningConfig", num_virtual_tokens=4),
    "vera": with_vera,
    "llama": trainers.model,
    "without items": WithoutItems(),
    "trained biases": with_trained_biases,
    "adapters": adapted.model,
}


def trainer_run(kinds, folder, model, settings):
    """Train, evaluate and save, with checkpoints where the settings ask for them."""
    trainer_kind, arguments_kind = kinds
    options = {"made": MODELS[model], "dtype": DTYPE, **settings}
    result = trainers.run(trainer_kind, arguments_kind, folder, **options)
    result["checkpoints"] = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return result


def on_transformers(model, settings):
    """The run with Transformers in one process."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder, trainers.launched_alone():
        return trainer_run((Trainer, TrainingArguments), folder, model, settings)


def on_plaits_trainer(rank, world, folder, model, settings):
    """The run with Plait's Trainer. Runs on every rank."""
    with trainers.launched(rank, world):
        from plait.hf import Trainer, TrainingArguments

        return trainer_run((Trainer, TrainingArguments), folder, model, settings)


def message_of_plaits_trainer(rank, world, folder, model, settings):
    """Return the error of a run with Plait's Trainer. Runs on every rank."""
    try:
        on_plaits_trainer(rank, world, folder, model, settings)
    except PlaitError as error:
        return str(error)
    return ""
