"""Transformers' Trainers on Plait, and `wrap` for their subclasses.

The Trainer keeps its loop, its data sets, its LR schedule, its logging and its callbacks. It gets
the number of processes, their indices and gathered tensors from `hf.accelerator`. The engine runs
each micro-batch and the optimizer step. Nothing is wrapped, so `trainer.model` is the user's own
object.

Note [Life of a step]
    `get_batch_samples` reads the micro-batches of a step, and `_get_num_items_in_batch` makes the
    `TrainerStep` for them. Each call of `training_step` runs inside `_micro_batch`, which computes
    the factor of the loss. `_backward` multiplies the loss by this factor. The Trainer then calls
    `optimizer.step`, which is `EngineOptimizerProxy.step`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
import transformers
from accelerate.utils import find_batch_size
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

from plait.attributes import override_attributes
from plait.checkpoint.states import save_trained_only
from plait.cluster.topology import place
from plait.config.schema.config import Config
from plait.data.split_rows import refuse_differing_rows, seeded_generators
from plait.engine.build import initialize
from plait.engine.engine import Engine
from plait.errors import ConfigError, InputError, Problem, raise_problems, warn
from plait.hf.accelerator import FULL_WEIGHTS, EngineOptimizerProxy, RanksAccelerator
from plait.hf.arguments import (
    ConfigSource,
    fsdp_config_of,
    patch_transformers,
    schedule_of,
    settings_of,
)
from plait.hf.batches import EpochOrder, Rounds, plan_of
from plait.hf.checkpoints import CheckpointMixin, saving_problems
from plait.hf.fields import examined
from plait.hf.generation import (
    answering,
    check_settings,
    gathered_parameters,
    generated,
    generates,
    has_encoder,
    problems_of,
)
from plait.hf.steps import (
    FilledStep,
    TrainerStep,
    counted,
    from_output_stage,
    run_pipeline,
    smoothing_of,
    step_of,
)
from plait.hf.transformers_trainer import (
    has_supported_trainer,
    layout_free_groups,
    loss_is_scaled,
    reads,
    recompute_fields,
    require_supported_trainer,
    warnings_about_loss,
)
from plait.model.adapters import adapter_names, with_adapters_enabled
from plait.optim.lr_schedules import build_scheduler
from plait.parallel.micro_batches import default_forward
from plait.sharded.model import owner_of
from plait.sharded.shards_as_weights import refuse_shards_as_weights

# A Trainer that Plait refuses keeps its own handling of `deepspeed` and `fsdp`.
if has_supported_trainer():
    patch_transformers()


class TrainerMixin(CheckpointMixin):
    """Base class that makes a Trainer train with Plait.

    It must be the first base: `class Mine(TrainerMixin, SomeTrainer)`. `wrap` creates such a class.

    Args:
        args: Arguments of the Trainer.
        plait_config: A path to JSON or YAML, a mapping or a Config. The default is the
            configuration of the TrainingArguments, or else data parallelism over all processes.
        kwargs: Keyword arguments of the Trainer.

    Raises:
        ConfigError: The configuration contradicts the arguments, or a setting is not supported.
        InputError: The Trainer, or the release of Transformers, is not supported.
    """

    trains_with_plait = True
    optimizer: Any
    callback_handler: Any
    _batches: FilledStep
    gather_function: Any

    def __init__(self, *args: Any, plait_config: ConfigSource | None = None, **kwargs: Any) -> None:
        require_supported_trainer()
        _refuse_other_trainers(type(self))
        self._plait_source = plait_config
        self._step: TrainerStep | None = None
        self._plan: Any = None
        """Object with the number of ranks that have a batch of the current loader."""
        self._position = 0
        self._epoch = 0
        self._steps_of_epoch: int | None = None
        self._count: int | None = None
        """Number of this rank's own samples in a micro-batch of an evaluation."""
        # Bounded, because an entry keeps its data set alive.
        self._compared_data: deque[Any] = deque(maxlen=8)
        """Data sets whose rows were compared between ranks."""
        self._evaluated_samples = 0
        # A sample of DPO is a pair.
        self._rows_of_sample = 2 if "DPOTrainer" in _trl_classes(type(self)) else 1
        self._body: Callable[[Any, Any], Any] | None = None
        """Forward of the model while a call of the Trainer runs in the engine."""
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, with the data-parallel ranks of the layout as its processes.

        Raises:
            ConfigError: A setting is not supported, or settings contradict each other.
        """
        source = self._config_source()
        hidden_size = getattr(getattr(self.model, "config", None), "hidden_size", None)
        process = place()
        self.plait_config, self._resolved = settings_of(
            source, self.args, world_size=process.world_size, hidden_size=hidden_size
        )
        problems, notes = examined(self.args, self._resolved.layout)
        pp = self._resolved.layout.pp
        if _trl_classes(type(self)) and pp > 1:
            rule = (
                "TRL computes losses and metrics from the head's weight, outside the model's own"
                " forward, which no stage can run"
            )
            remedy = "use 1, or plait.hf.Trainer on the prepared data"
            problems.append(Problem("parallel.pp", pp, rule, remedy))
        raise_problems([*problems, *problems_of(self.model, self.args, self._resolved)])
        if process.rank == 0:
            for note in notes:
                warn(note)

        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.accelerator = RanksAccelerator.adopt(
            self.accelerator, self._resolved, rank=process.rank, seed=seed
        )
        self.accelerator.backward_of = self._backward
        self.gather_function = self.accelerator.gather_for_metrics
        # Otherwise the Trainer would load and save by DeepSpeed's or FSDP's rules.
        self.is_deepspeed_enabled = False
        self.is_fsdp_enabled = False

    def _config_source(self) -> ConfigSource | None:
        sources = {
            "the Trainer's plait_config=": self._plait_source,
            "TrainingArguments.plait_config": getattr(self.args, "plait_config", None),
            "TrainingArguments.deepspeed": self.args.deepspeed,
            "TrainingArguments.fsdp": fsdp_config_of(self.args),
        }
        passed = [name for name, source in sources.items() if source]
        if len(passed) > 1:
            rule = f"{passed[1]} is given too, and both describe the run"
            raise ConfigError(Problem(passed[0], None, rule, "pass one of them"))
        return sources[passed[0]] if passed else None

    plait_config: Config

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        # Precision and compilation are the engine's: no autocast, no second loss scale.
        return arguments | {
            "mixed_precision": "no",
            "deepspeed_plugin": None,
            "dynamo_plugin": None,
        }

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Do nothing: the engine moves the shards of this rank."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train the model, as the Trainer does. Collective."""
        # An evaluation saves nothing.
        raise_problems(saving_problems(self.args, self._resolved))
        # The engine recomputes and compiles. The Trainer would do it a second time.
        names = (*recompute_fields(self.args), "torch_compile")
        with override_attributes(self.args, **dict.fromkeys(names, False)):
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise InputError: the search is not supported."""
        raise InputError(
            "hyperparameter_search trains one model after another in one process group, which is"
            " not tested with Plait; start a run for each set of hyperparameters"
        )

    def begin(self) -> Engine:
        """Return the engine of `self.model`, creating it if necessary.

        Collective if the engine is created.

        Raises:
            ConfigError: The configuration does not fit the model.
            ModelError: The model cannot be trained, or the configuration cannot split it.
            InputError: Arguments of the Trainer are not supported together.
        """
        if self.engine is not None and owner_of(self.model) is self.engine.sharded:
            return self.engine
        # A script has assigned another model.
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        if self._rows_of_sample > 1 and self.compute_metrics is not None:  # type: ignore[attr-defined]
            raise InputError(
                "DPOTrainer(compute_metrics=...): an evaluation has two rows of logits for every"
                " pair, and metrics of them are not tested; leave it out: rewards, margins and"
                " accuracies are logged"
            )
        if generates(self.args) and not has_encoder(self.model):
            check_settings(self.model)
        # A multiplication and an addition per weight in the forward, and twice as many in the
        # backward. The weights are counted before they are sharded.
        self._flops_per_token = 6 * sum(p.numel() for p in self.model.parameters())
        # Checkpoints of a model with adapters do not have its frozen weights.
        if adapter_names(self.model):
            save_trained_only(self.model)
        smoother: Any = self.label_smoother  # type: ignore[has-type]
        self.label_smoother = None if smoother is None else smoothing_of(smoother, self.model)

        # An evaluation inside `model.disable_adapter()`, which freezes the adapters, may come
        # before the training.
        optimizer = self._optimizer_source()
        with with_adapters_enabled(self.model):
            self.engine = initialize(
                self.model, self._resolved, optimizer=optimizer, forward=self._forward
            )
        remedy = f"trainer.save_model(folder), or trainer.{FULL_WEIGHTS}"
        refuse_shards_as_weights(self.model, remedy=remedy, is_partial=self._resolved.layout.pp > 1)
        self.accelerator.engine = self.engine
        self.optimizer = EngineOptimizerProxy(self.engine)
        return self.engine

    def _optimizer_source(self) -> Any:
        """Return the argument `optimizer` of `initialize`, or None if the configuration has one."""
        passed = self.optimizer
        if self.plait_config.optimizer is None:
            return passed if passed is not None else lambda _: self.create_optimizer()
        if passed is not None:
            raise InputError(
                "the configuration has an `optimizer`, but the Trainer was given optimizers=; leave"
                " one of them out"
            )
        return None

    def _forward(self, model: Any, micro_batch: Any) -> Any:
        # `engine.generate` and `engine.predict` run outside a call of the Trainer.
        body = self._body or default_forward
        return body(model, micro_batch)

    def _run_with_forward(self, body: Callable[[Any, Any], Any], call: Callable[[], Any]) -> Any:
        """Call a function while `body` replaces the model's forward."""
        with override_attributes(self, _body=body):
            return call()

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        # As in Transformers, an earlier call of train() leaves no schedule.
        if getattr(self, "_created_lr_scheduler", False):
            self.lr_scheduler = None
            self._created_lr_scheduler = False
        engine = self.begin()
        if place().rank == 0:
            for warning in warnings_about_loss(
                self, ranks=engine.dp_size, accumulation=self.args.gradient_accumulation_steps
            ):
                warn(warning)
        # `accelerator.prepare` would register them, but it is not called for an engine.
        self.accelerator._optimizers.append(self.optimizer)
        self.accelerator._models.append(self.model)
        self.model_wrapped = self.model
        self.create_scheduler(num_training_steps=max_steps)
        self._steps_of_epoch = None
        if has_length(train_dataloader):
            accumulation = self.args.gradient_accumulation_steps
            self._steps_of_epoch = math.ceil(len(train_dataloader) / accumulation)
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        self._refuse_split_rows(train_dataloader)
        engine.train()
        return self.model, train_dataloader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the Trainer's optimizer, with the same parameter groups on every layout."""
        with layout_free_groups():
            return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the configuration's LR schedule or, if it has none, the Trainer's."""
        spec = schedule_of(
            self.plait_config,
            self.args,
            world_size=place().world_size,
            max_steps=num_training_steps,
        )
        if spec is None:
            return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        if self.lr_scheduler is None:
            self.lr_scheduler = build_scheduler(
                spec, optimizer or self.optimizer, total_steps=num_training_steps
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        with override_attributes(self.accelerator, evaluates=not is_training):
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)  # type: ignore[misc]

    def _refuse_split_rows(self, loader: Any) -> None:
        """Raise InputError if the rows of a loader's data set differ between ranks. Collective.

        The check runs when training or evaluation starts, not when the loader is created, because a
        script may create a loader on one rank only.
        """
        data = getattr(loader, "dataset", None)
        # By identity: a data set may define `==`.
        is_compared = any(compared is data for compared in self._compared_data)
        if is_compared or not isinstance(plan_of(loader), Rounds):
            return
        self._compared_data.append(data)
        workers = loader.num_workers
        context = loader.multiprocessing_context
        refuse_differing_rows(
            data, device=self.accelerator.device, workers=workers, context=context
        )

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if has_length(self.train_dataset) and not len(self.train_dataset):  # type: ignore[attr-defined]
            raise InputError(
                "train_dataset has 0 samples, but training needs at least 1; check the split, the"
                " filter and the path that it came from"
            )
        sampler = super()._get_train_sampler(*args, **kwargs)  # type: ignore[misc]
        # By default a group has the samples of one process, and the order depends on the layout.
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size = self.get_total_train_batch_size(self.args)
        # Accelerate determines the order of a RandomSampler, a generator that of another sampler.
        is_random = isinstance(sampler, torch.utils.data.RandomSampler)
        if is_random or getattr(sampler, "generator", self) is not None:
            return sampler
        return EpochOrder(sampler, self.accelerator.seed)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of samples per step over the data-parallel ranks."""
        ranks = self._resolved.layout.dp
        return self._train_batch_size * args.gradient_accumulation_steps * ranks  # type: ignore[attr-defined]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        is_resumed = (
            kwargs["resume_from_checkpoint"] is not None
            and kwargs["epoch"] == kwargs["epochs_trained"]
        )
        skipped = 0
        if is_resumed and not self.args.ignore_data_skip:
            skipped = kwargs["steps_trained_in_current_epoch"]
        self._plan = plan_of(kwargs["train_dataloader"])
        self._position = skipped
        self._epoch = kwargs["epoch"]
        return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the micro-batches of a step, and the number of items in all of them. Collective.

        If a stream ends inside a step, the step ends there too. Transformers would add the
        gradients of the incomplete step to those of the next one. See Note [Life of a step].
        """
        self._batches = FilledStep(epoch_iterator)
        # Data sets and collators may draw random numbers.
        with seeded_generators(
            "training",
            self.accelerator.seed,
            self._epoch,
            self._position,
            self.accelerator.process_index,
        ):
            return super().get_batch_samples(self._batches, *args, **kwargs)  # type: ignore[misc]

    def _track_num_input_tokens(self, inputs: Any) -> None:
        assert self._step is not None
        present = self._step.present[self._step.begun - 1]
        if present:
            with self.accelerator.counting(present=present):
                super()._track_num_input_tokens(inputs)  # type: ignore[misc]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        layout = self._resolved.layout
        accelerator = self.accelerator
        if accelerator.evaluates_alone:
            with accelerator.own_counts():
                return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        filled = self._batches.filled
        count = len(batch_samples) - filled
        self._step = step_of(
            self._plan,
            position=self._position,
            count=count,
            ranks=layout.dp,
            index=accelerator.process_index,
            filled=filled,
        )
        self._position += count
        return super()._get_num_items_in_batch(counted(batch_samples, self._step), device)  # type: ignore[misc]

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Run forward and backward of a micro-batch. Collective.

        With pipeline parallelism, the last call of a step runs all micro-batches of the step.

        Returns:
            The loss, multiplied by its factor in the step.
        """
        with self._micro_batch(num_items_in_batch) as step:
            step.counted = True
            engine = self.engine
            assert engine is not None
            if engine.sharded.pipeline is not None:
                scaled = loss_is_scaled(self, num_items_in_batch)
                return self._pipeline_step(engine, step, inputs, num_items_in_batch, scaled=scaled)
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        return loss * self._factor

    @contextmanager
    def _micro_batch(self, items: Any) -> Iterator[TrainerStep]:
        """Run the forward and the backwards of a micro-batch in this context.

        A nested call, as by `super().training_step`, belongs to the same micro-batch. See
        Note [Life of a step].
        """
        engine = self.engine
        step = self._step
        assert engine is not None and step is not None
        if step.inside:
            yield step
            return
        # Only at the start of a step, because it drops the gradients of a failed one.
        if step.begun == 0:
            engine.sharded.guard.recover()
        step.begun += 1
        step.inside = True
        step.counted = False
        index = step.begun - 1
        self._factor = step.factor(index, scaled=loss_is_scaled(self, items), ranks=engine.dp_size)
        try:
            if engine.sharded.pipeline is not None:
                yield step
                return
            engine.set_gradient_accumulation_boundary(step.is_last)
            engine.sharded.before_microbatch(last=step.is_last)
            with (
                self.accelerator.counting(present=step.present[index] or None),
                engine.sharded.guard.running("forward"),
            ):
                yield step
        finally:
            step.inside = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap the subclass's own `training_step`, if any, so that it runs as a micro-batch."""
        super().__init_subclass__(**kwargs)
        if "training_step" in vars(cls):
            cls.training_step = _as_micro_batch(vars(cls)["training_step"])  # type: ignore[method-assign]

    def _backward(self, loss: torch.Tensor) -> None:
        assert self.engine is not None
        # The engine divides by the number of micro-batches, which the Trainer has already done.
        self.engine.backward(loss * (self._factor * self.engine.gradient_accumulation_steps()))

    def _pipeline_step(
        self, engine: Engine, step: TrainerStep, inputs: Any, items: Any, *, scaled: bool
    ) -> torch.Tensor:
        # A pipeline runs all micro-batches at once, in the last call of the step.
        step.micro_batches.append(self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        if not step.is_last:
            return torch.zeros((), device=engine.device)

        engine.train()
        factors = [
            step.factor(index, scaled=scaled, ranks=engine.dp_size)
            for index in range(len(step.micro_batches))
        ]
        if not scaled:
            factors = [factor / len(step.micro_batches) for factor in factors]
        # The loss of a step without a target is 0, not 0 / 0.
        if isinstance(items, torch.Tensor):
            items = items.clamp(min=1)

        def loss_of(model: Any, micro_batch: Any) -> torch.Tensor:
            return self.compute_loss(model, dict(micro_batch), num_items_in_batch=items)  # type: ignore[attr-defined]

        total = run_pipeline(engine, step.micro_batches, factors, loss_of, self._run_with_forward)
        step.micro_batches = []
        return total.to(torch.float32)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        """Return a tensor for the norm. The optimizer step clips, and writes the norm to it."""
        return self.optimizer.new_norm()

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.optimizer.new_norm() if grad_norm is None else grad_norm

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the FLOPs of this process's share of a micro-batch.

        Their sum over all processes is the FLOPs of the micro-batches of all data-parallel ranks.
        """
        layout = self._resolved.layout
        estimate = getattr(self.model, "estimate_tokens", None)
        tokens = estimate(inputs) if callable(estimate) else 0
        return int(self._flops_per_token * tokens * layout.dp / layout.world_size)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the model with each sample once. Collective.

        Each rank computes the loss of its own batch only, as a single process does.
        """
        engine = self.begin()
        self._refuse_split_rows(dataloader)
        plan = plan_of(dataloader)
        # An evaluation may run during training.
        training_plan = self._plan
        training_position = self._position
        self._plan = plan
        self._position = 0
        self._evaluated_samples = 0
        if plan is not None:
            self.gather_function = self._gather_samples
        else:
            self.gather_function = self.accelerator.gather_for_metrics
        try:
            with (
                engine.evaluating(),
                seeded_generators(
                    "evaluation", self.accelerator.seed, self.accelerator.process_index
                ),
            ):
                output = super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
            # Transformers leaves the model in evaluation mode, and trainers read it to name the
            # metrics of their next log.
            self.model.eval()
        finally:
            self._plan = training_plan
            self._position = training_position
            self._count = None
            self.gather_function = self.accelerator.gather_for_metrics
        if plan is None or hasattr(plan, "batch_sampler"):
            return output
        # The length of a stream is known now.
        samples = torch.tensor(self._evaluated_samples, device=engine.device)
        return output._replace(num_samples=int(self.accelerator.reduce(samples)))

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Evaluate a micro-batch. Collective.

        With pipeline parallelism, every stage returns the result.
        """
        engine = self.begin()
        rank = self.accelerator.process_index
        rows = (find_batch_size(inputs) or 0) // self._rows_of_sample
        first = (self._position * self.accelerator.layout.dp + rank) * rows
        present = None
        samples = None
        if self._plan is not None:
            present = self._plan.present(self._position)
            samples = self._plan.samples(self._position)
        if samples is None:
            samples = rows
        has_batch = present is None or rank < present
        self._count = samples if has_batch else 0
        self._position += 1
        self._evaluated_samples += self._count

        evaluate = partial(
            super().prediction_step,  # type: ignore[misc]
            prediction_loss_only=prediction_loss_only,
            ignore_keys=ignore_keys,
            **kwargs,
        )
        with ExitStack() as stack:
            if generates(self.args) and not prediction_loss_only:
                if has_encoder(self.model):
                    stack.enter_context(gathered_parameters(engine))
                else:
                    inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
                    arguments = kwargs or getattr(self, "_gen_kwargs", {})
                    seed = self.args.seed
                    tokens = generated(engine, inputs, arguments, first=first, seed=seed)
                    stack.enter_context(answering(self.model, tokens))
            stack.enter_context(self.accelerator.alone())
            stack.enter_context(self.accelerator.counting(present=present))
            if engine.sharded.pipeline is None:
                with engine.sharded.guard.running("forward"):
                    return evaluate(model, inputs)

            inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
            prepared = engine.sharded.prepare_batch(inputs)
            output = self._run_with_forward(
                lambda staged, micro_batch: evaluate(staged, dict(micro_batch)),
                lambda: engine.sharded.output(prepared),
            )
        return from_output_stage(engine, output)

    def _gather_samples(self, data: Any) -> Any:
        return self.accelerator.gather_first(data, self._count)

    def end(self) -> None:
        """Release the models, and destroy the process group. Collective."""
        for reference in self.accelerator.references:
            reference.close()
        if self.engine is not None:
            self.engine.close()
        # Before Transformers 5.20 the Trainer has no `end`; this is all that it does since then.
        getattr(super(), "end", self.accelerator.end_training)()


def _as_micro_batch(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a script's own `training_step` so that it runs as one micro-batch of the engine."""

    @wraps(method)
    def training_step(
        self: TrainerMixin,
        model: Any,
        inputs: Any,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert self.engine is not None
        if self.engine.sharded.pipeline is not None and not reads(method, "training_step"):
            raise InputError(
                f"{type(self).__name__}.training_step calls forward and backward itself, and with"
                f" parallel.pp = {self.engine.mesh.layout.pp} each process has a part of the model;"
                " call super().training_step in it, or use parallel.pp = 1"
            )
        with self._micro_batch(num_items_in_batch) as step:
            loss = method(self, model, inputs, num_items_in_batch, **kwargs)
            # `super().training_step` has multiplied by the factor already.
            is_scaled = step.counted
        return loss if is_scaled else loss * self._factor

    return training_step


def _trl_classes(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__ if base.__module__.partition(".")[0] == "trl"]


def _refuse_other_trainers(kind: type) -> None:
    """Raise InputError for a TRL trainer that has not been tested with Plait."""
    names = _trl_classes(kind)
    # The first one decides: GKDTrainer and GOLDTrainer are subclasses of SFTTrainer.
    if not names or names[0] in ("SFTTrainer", "DPOTrainer"):
        return
    if names[0].removeprefix("Async") in _GENERATE:
        reason = (
            "it generates between steps, counts samples by processes and moves weights to a "
            "generator, and Plait is not tested with such trainers"
        )
    else:
        reason = "Plait is not tested with its loss and its data"
    raise InputError(
        f"{names[0]}: {reason}; of TRL's trainers, use SFTTrainer or DPOTrainer with Plait, or "
        f"use {names[0]} without Plait and without deepspeed="
    )


_GENERATE = (
    "GRPOTrainer",
    "RLOOTrainer",
    "OnlineDPOTrainer",
    "NashMDTrainer",
    "XPOTrainer",
    "PPOTrainer",
    "GMPOTrainer",
    "A2POTrainer",
    "GKDTrainer",
    "GOLDTrainer",
    "MiniLLMTrainer",
    "DistillationTrainer",
    "ServerDistillationTrainer",
    "SDFTTrainer",
    "SDPOTrainer",
    "IWOPDTrainer",
)
"""Trainers of TRL that sample from the model while they train."""


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` on any layout of Plait."""


class Seq2SeqTrainer(TrainerMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on any layout of Plait."""


def wrap(trainer: type[Any]) -> type[Any]:
    """Return a subclass of `trainer`, with the same name, that trains with Plait.

    Args:
        trainer: A subclass of `transformers.Trainer`, such as a trainer of TRL.

    Raises:
        InputError: `trainer` is not such a class.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise InputError(f"plait.hf.wrap takes a subclass of transformers.Trainer, not {trainer!r}")
    if issubclass(trainer, TrainerMixin):
        return trainer
    # The name, module and documentation of the class that the script knows.
    members = {"__doc__": trainer.__doc__, "__module__": trainer.__module__}
    return type(trainer.__name__, (TrainerMixin, trainer), members)
