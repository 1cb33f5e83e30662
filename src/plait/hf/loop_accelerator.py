"""`plait.hf.Accelerator`: Accelerate's Accelerator for your own training loop, on Plait's engine.

`prepare` shards the model in place, and returns the same object. `accelerator.backward`, the
optimizer's `step` and the scheduler's `step` do what they do under Accelerate. A call that is not
supported raises an error that names an alternative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import broadcast_object_list, recursively_apply
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from plait.checkpoint.states import save_trained_only
from plait.cluster.mesh import DEFAULT_TIMEOUT
from plait.cluster.topology import place
from plait.data.split_rows import refuse_differing_rows
from plait.engine.build import initialize
from plait.errors import InputError, warn
from plait.hf.accelerator import (
    FULL_WEIGHTS,
    EngineOptimizerProxy,
    RanksAccelerator,
    rejoin,
)
from plait.hf.arguments import ConfigSource
from plait.hf.batches import plan_of
from plait.hf.checkpoints import DrawnOrder, LoopCheckpoints
from plait.hf.loop_settings import (
    checked_config,
    precision_of,
    refuse_another_clipping,
    refuse_arguments,
    resolved_of,
)
from plait.model.adapters import adapter_names
from plait.sharded.model import owner_of
from plait.sharded.shards_as_weights import refuse_shards_as_weights

_PREPARE = "accelerator.prepare(model, optimizer, ...)"


class Accelerator(LoopCheckpoints, RanksAccelerator):
    """`accelerate.Accelerator` with Plait's layouts. Its processes are the data-parallel ranks.

    Args:
        plait_config: A path to JSON or YAML, a mapping or a Config. A DeepSpeed file is valid as it
            is. Without a configuration the model is replicated.
        mixed_precision: "no", "bf16" or "fp16".
        deepspeed_plugin: A plugin whose `deepspeed_config` is used, without DeepSpeed.
        arguments: Other arguments of Accelerate's class.

    Raises:
        ConfigError: The configuration contradicts the arguments, or has a setting that is not
            supported in a loop with `accelerator.backward(loss)`.
        InputError: An argument is not supported.
    """

    _sharding_call = _PREPARE

    def __init__(
        self,
        *,
        plait_config: ConfigSource | None = None,
        mixed_precision: str | None = None,
        deepspeed_plugin: Any = None,
        **arguments: Any,
    ) -> None:
        refuse_arguments(arguments)
        if plait_config is not None and deepspeed_plugin is not None:
            raise InputError(
                "plait.hf.Accelerator was given plait_config= and deepspeed_plugin=; leave one of"
                " them out"
            )
        source = plait_config if deepspeed_plugin is None else deepspeed_plugin.deepspeed_config
        self._precision = precision_of(mixed_precision)
        self.own_rank = place().rank
        self.references = []
        # The loop has to know which ranks have no batch of a stream, so streams are read as in an
        # evaluation.
        self.evaluates = True
        self._holding = False
        """True while gradients are accumulated without a reduction."""
        self._orders: list[DrawnOrder] = []
        """Samplers of the shuffled loaders."""

        plugin = arguments.get("gradient_accumulation_plugin")
        if plugin is not None:
            self._steps = int(plugin.num_steps)
        else:
            self._steps = int(arguments.get("gradient_accumulation_steps", 1))
        self._config = checked_config(source, precision=self._precision, accumulation=self._steps)
        # Only the layout is read until `prepare` knows the batch size and the model.
        self.resolved = self._resolve(micro=1, hidden_size=None)
        self.layout = self.resolved.layout

        rejoin("gloo" if arguments.get("cpu") else None, timeout=DEFAULT_TIMEOUT)
        # Precision is the engine's: no autocast, no second loss scale.
        super().__init__(mixed_precision="no", **arguments)
        if self.gradient_accumulation_steps != self._steps:
            raise InputError(
                f"accelerate launch set {self.gradient_accumulation_steps} accumulation steps, but"
                f" the script has {self._steps}; pass gradient_accumulation_steps= to Accelerator"
            )

    def _resolve(self, *, micro: int, hidden_size: int | None) -> Any:
        return resolved_of(
            self._config,
            world_size=place().world_size,
            precision=self._precision,
            accumulation=self._steps,
            micro=micro,
            hidden_size=hidden_size,
        )

    @property
    def mixed_precision(self) -> str:
        """Precision in which the engine computes, without autocast.

        It is the argument `mixed_precision`, or else the setting of `accelerate launch`.
        """
        return self._precision

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare models, optimizers, schedulers and data loaders. Collective.

        The model whose parameters the optimizer updates is trained. Other models only run forwards.

        Returns:
            The prepared objects in the order of the arguments: loaders of this rank's batches,
            models that were sharded in place, their optimizer and schedulers.

        Raises:
            ConfigError: The configuration does not fit the model.
            ModelError: The model cannot be trained, or the configuration cannot split it.
            InputError: The arguments do not fit each other, such as an optimizer over the
                parameters of another model.
        """
        loaders = [entry for entry in args if isinstance(entry, DataLoader)]
        prepared: dict[int, Any] = {
            id(loader): self.prepare_data_loader(loader) for loader in loaders
        }
        optimizers = []
        models = []
        for entry in args:
            is_optimizer = isinstance(entry, torch.optim.Optimizer)
            # A script may pass what was prepared in an earlier call.
            if is_optimizer and not isinstance(entry, LoopOptimizer):
                optimizers.append(entry)
            if isinstance(entry, nn.Module) and owner_of(entry) is None:
                models.append(entry)

        trained = self._trained_model(models, optimizers)
        if trained is not None:
            optimizer = optimizers[0]
            prepared[id(optimizer)] = self._begin(trained, optimizer, loaders)
        for model in models:
            if model is not trained:
                self.prepare_model(model, evaluation_mode=True)
        # Schedulers need the prepared optimizer.
        for entry in args:
            if isinstance(entry, LRScheduler):
                prepared[id(entry)] = self.prepare_scheduler(entry)
        results = tuple(prepared.get(id(entry), entry) for entry in args)
        return results if len(results) > 1 else results[0]

    def _trained_model(
        self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]
    ) -> nn.Module | None:
        if not optimizers:
            return None
        if len(optimizers) > 1 or self.engine is not None:
            raise InputError(
                "plait.hf.Accelerator trains one model with one optimizer; use parameter groups for"
                " different settings, and for several models call plait.parallelize(model, config)"
                " for each"
            )
        groups = optimizers[0].param_groups
        updated = {id(parameter) for group in groups for parameter in group["params"]}
        candidates = [
            model
            for model in models
            if any(id(parameter) in updated for parameter in model.parameters())
        ]
        if len(candidates) != 1:
            raise InputError(
                f"accelerator.prepare: the optimizer has parameters of {len(candidates)} of the"
                " models in this call, but must have those of exactly one; build it over"
                " model.parameters(), and prepare both in one call"
            )
        return candidates[0]

    def _begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loaders: list[Any]
    ) -> LoopOptimizer:
        """Create the engine, and return the optimizer of the loop."""
        micro = 1
        if loaders and loaders[0].batch_size:
            micro = loaders[0].batch_size
        hidden_size = getattr(getattr(model, "config", None), "hidden_size", None)
        self.resolved = self._resolve(micro=micro, hidden_size=hidden_size)
        # Checkpoints of a model with adapters do not have its frozen weights.
        if adapter_names(model):
            save_trained_only(model)
        self.engine = initialize(model, self.resolved, optimizer=optimizer)
        refuse_shards_as_weights(model, remedy=FULL_WEIGHTS)
        loop_optimizer = LoopOptimizer(self)
        self._models.append(model)
        self._optimizers.append(loop_optimizer)
        self._announce_micro_batch()
        return loop_optimizer

    def prepare_model(
        self, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model that only runs forwards.

        Raises:
            InputError: The model is to be trained. Pass it to `prepare` with its optimizer.
        """
        if not evaluation_mode and owner_of(model) is None:
            raise InputError(
                "accelerator.prepare_model: a model is trained with its optimizer; call"
                " accelerator.prepare(model, optimizer)"
            )
        return super().prepare_model(model, evaluation_mode=evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> NoReturn:
        """Raise InputError, because an optimizer is prepared together with its model."""
        raise InputError(
            "accelerator.prepare_optimizer is not supported; call accelerator.prepare(model,"
            " optimizer), with both in one call"
        )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a scheduler that steps with the optimizer.

        Per optimizer step, the scheduler takes one step for each data-parallel rank, as under
        Accelerate.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        loop_scheduler = LoopScheduler(
            scheduler, self._optimizers, step_with_optimizer=self.step_scheduler_with_optimizer
        )
        loop_scheduler.times = self.num_processes
        self._schedulers.append(loop_scheduler)
        return loop_scheduler

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a data loader of this rank's batches, in Accelerate's order.

        A rank without a batch in the last round repeats the batch of another rank. `backward` and
        `gather_for_metrics` ignore the repeated batch. See Note [Rounds of batches] in
        `hf.batches`.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        if isinstance(data_loader.dataset, IterableDataset):
            if data_loader.num_workers and self.num_processes > 1 and place().rank == 0:
                warn(
                    "an iterable data set is read without workers, because workers would not report"
                    " the rank that has no batch left"
                )
        else:
            workers = data_loader.num_workers
            context = data_loader.multiprocessing_context
            refuse_differing_rows(
                data_loader.dataset, device=self.device, workers=workers, context=context
            )
            if not self.use_seedable_sampler:
                self._share_order(data_loader)
        prepared = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepared._is_accelerate_prepared = True
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader for the rest of an epoch, in the order of that epoch.

        `dataloader` itself continues with the next epoch.
        """
        remainder = super().skip_first_batches(dataloader, num_batches)
        remainder.iteration = dataloader.iteration
        dataloader.iteration += 1
        return remainder

    def _order(self) -> dict[str, Any]:
        return {
            "use_seedable_sampler": self.use_seedable_sampler,
            "data_seed": self.dataloader_config.data_seed,
        }

    def _share_order(self, loader: Any) -> None:
        """Make all ranks draw samples in the first rank's order, as Accelerate does. Collective."""
        batch_sampler = loader.batch_sampler
        sampler: Any = getattr(batch_sampler, "sampler", None)
        if not hasattr(sampler, "generator"):
            return
        if sampler.generator is None:
            # The seed is drawn as torch's RandomSampler draws it.
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        state = [sampler.generator.get_state()]
        broadcast_object_list(state)
        sampler.generator.set_state(state[0])
        batch_sampler.sampler = DrawnOrder(sampler)
        self._orders.append(batch_sampler.sampler)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Run one micro-batch inside the context.

        Every `gradient_accumulation_steps`-th micro-batch ends a step, and so does the last one of
        an epoch.
        """
        self._do_sync()
        with self._hold(not self.sync_gradients):
            yield

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Accumulate gradients inside the context. A later backward outside it reduces them."""
        with self._hold(True):
            yield

    @contextmanager
    def _hold(self, holding: bool) -> Iterator[None]:
        before = self._holding
        self._holding = holding
        self._announce_micro_batch()
        try:
            yield
        finally:
            self._holding = before
            self._announce_micro_batch()

    def _announce_micro_batch(self) -> None:
        """Tell the engine before a forward whether the backward's gradients will be reduced."""
        if self.engine is not None:
            self.engine.set_gradient_accumulation_boundary(not self._holding)
            self.engine.sharded.before_microbatch(last=not self._holding)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of a micro-batch from its mean loss. Collective.

        The loss is divided by `gradient_accumulation_steps`. Gradients are averaged over the ranks
        that have a batch.
        """
        engine = self._require_engine("backward")
        if kwargs:
            raise InputError(
                f"accelerator.backward({', '.join(kwargs)}=): it takes the loss only; for several"
                " losses of one forward, add them up and call accelerator.backward(loss) once"
            )
        if engine.sharded.guard.reduced:
            raise InputError(
                "accelerator.backward after accelerator.clip_grad_norm_: the step's gradients are"
                " complete, and would be summed again; call optimizer.step(), or"
                " optimizer.zero_grad(), first"
            )
        # The engine divides by all ranks.
        present = self._ranks_with_batch()
        factor = 0.0
        if self.process_index < present:
            factor = engine.dp_size / present
        self._announce_micro_batch()
        # The engine divides by its own number of micro-batches. Accelerate's may be changed later.
        engine.backward(loss * (factor * self._steps / self.gradient_accumulation_steps))

    def _ranks_with_batch(self) -> int:
        """Return how many data-parallel ranks have a batch of their own in the current round."""
        loader = self.gradient_state.active_dataloader
        if loader is None or not loader.end_of_dataloader:
            return self.num_processes
        plan = plan_of(loader)
        if plan is None:
            return self.num_processes
        return plan.present_last

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Return the global gradient norm, and make the optimizer's step clip by `max_norm`.

        Call it after the last backward of a step. Each gradient element counts once in the norm on
        every layout. Collective.

        Returns:
            The norm before clipping: 0-dimensional, float64.

        Raises:
            InputError: Some of the trained parameters are not passed, the norm is not Euclidean, or
                gradients are not complete.
        """
        engine = self._require_engine("clip_grad_norm_")
        if norm_type != 2:
            raise InputError(
                f"accelerator.clip_grad_norm_(norm_type={norm_type}): Plait clips by the Euclidean"
                " norm; leave it out"
            )
        if not self.sync_gradients or self._holding:
            raise InputError(
                "accelerator.clip_grad_norm_ before a step's last backward clips gradients that are"
                " not complete; call it inside `if accelerator.sync_gradients:`"
            )
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        passed = {id(parameter) for parameter in parameters}
        missing = [
            name
            for name, parameter in engine.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in passed
        ]
        if missing:
            raise InputError(
                f"accelerator.clip_grad_norm_ was not given {missing[0]} ({len(missing)} trained"
                " parameters in all); pass model.parameters() of the prepared model: the step"
                " clips all of them by one norm"
            )
        refuse_another_clipping(self._config, max_norm)

        # The norm is that of gradients over all ranks. `optimizer.step` does not reduce them again.
        engine.sharded.finish_reduction()
        # Gradients contain the loss scale until the optimizer's step.
        norm = engine.sharded.grad_norm() / engine.sharded.loss_scale
        # With max_norm=inf a script only asks for the norm. The engine does not clip with 0.
        engine.stepper.clipping = 0.0 if math.isinf(max_norm) else float(max_norm)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        """Raise InputError, because clipping by value is not supported."""
        raise InputError(
            "accelerator.clip_grad_value_ is not supported; use accelerator.clip_grad_norm_"
        )

    def unscale_gradients(self, optimizer: Any = None) -> NoReturn:
        """Raise InputError, because the step unscales gradients."""
        raise InputError(
            "accelerator.unscale_gradients is not supported; remove the call, because"
            " optimizer.step() and accelerator.clip_grad_norm_ unscale the gradients"
        )

    def maybe_context_parallel(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise InputError, because context parallelism needs `engine.train_batch`."""
        raise InputError(
            "accelerator.maybe_context_parallel is not supported; use plait.initialize and"
            ' engine.train_batch with "parallel": {"cp": 2}'
        )

    def join_uneven_inputs(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise InputError, because Plait divides uneven inputs itself."""
        raise InputError(
            "accelerator.join_uneven_inputs is not needed, because a rank without a batch adds"
            " nothing to the gradients; remove the call"
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather the rows of all data-parallel ranks, each sample once. Collective.

        Ranks may have different numbers of rows.

        Returns:
            Tensors, or a list of objects if `input_data` has other entries than tensors.
        """
        has_batch = self.process_index < self._ranks_with_batch()
        if not use_gather_object and _has_only_tensors(input_data):
            return recursively_apply(
                lambda tensor: self._gather_own_rows(tensor, has_batch=has_batch),
                input_data,
                error_on_other_type=True,
            )
        return super().gather_for_metrics(input_data if has_batch else [], use_gather_object=True)

    def _gather_own_rows(self, tensor: torch.Tensor, *, has_batch: bool) -> Any:
        tensor = tensor.detach()
        if tensor.ndim == 0:
            tensor = tensor[None]
        return self.gather_first(tensor, len(tensor) if has_batch else 0)

    def free_memory(self, *objects: Any) -> Any:
        """Free the objects, and release the model. Another model may be prepared afterwards."""
        if self.engine is not None:
            self.engine.close()
        self.engine = None
        self._orders = []
        return super().free_memory(*objects)

    clear = free_memory


class LoopOptimizer(EngineOptimizerProxy):
    """Optimizer of an Accelerate loop.

    Between the micro-batches of a step, `step` and `zero_grad` do nothing.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator._require_engine("prepare"))
        self._accelerator = accelerator

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Reduce and clip gradients, and update the parameters. Collective.

        `accelerator.clip_grad_norm_` sets the norm to which the gradients are clipped.
        """
        if closure is not None:
            raise InputError(
                "optimizer.step(closure): gradients are reduced once per step; call it without a"
                " closure"
            )
        if not self._accelerator.sync_gradients:
            return
        configured = self.engine.config.gradient_clipping
        try:
            super().step()
        finally:
            # `clip_grad_norm_` is for one step.
            self.engine.stepper.clipping = configured
            self._accelerator._announce_micro_batch()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop unused gradients at the end of the accumulation, as Accelerate does.

        Between the micro-batches of a step this does nothing. `step` drops the gradients it uses.
        """
        dropped = self.engine.sharded.guard.backwards
        if not dropped or not self._accelerator.sync_gradients:
            return
        if dropped > 1 and place().rank == 0:
            warn(
                f"optimizer.zero_grad() drops the gradients of {dropped} micro-batches that no step"
                " has used; call it after optimizer.step()"
            )
        self.engine.zero_grad(restart=False)

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Raise InputError, because the states are shards of one layout."""
        raise InputError(
            "optimizer.load_state_dict() is not supported; call accelerator.load_state(folder),"
            " which loads the states of any layout"
        )


class LoopScheduler(AcceleratedScheduler):
    """Variant of Accelerate's scheduler that counts data-parallel ranks instead of processes.

    Attributes:
        times: Number of steps of the schedule per step of the optimizer.
    """

    times = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the schedule once per data-parallel rank, if the optimizer has stepped.

        A schedule that follows a metric is stepped once.
        """
        if not (self.step_with_optimizer and self.gradient_state.sync_gradients):
            super().step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            # It counts the values of a metric, of which there is one per call.
            self.scheduler.step(*args, **kwargs)
            return
        for _ in range(self.times):
            # Schedules with a fixed end, such as OneCycleLR, raise an error after it.
            if self.scheduler.last_epoch < getattr(self.scheduler, "total_steps", math.inf):
                self.scheduler.step(*args, **kwargs)


def _has_only_tensors(data: Any) -> bool:
    return all(isinstance(leaf, torch.Tensor) for leaf in _leaves(data))


def _leaves(data: Any) -> Iterable[Any]:
    if isinstance(data, dict):
        entries: Iterable[Any] = data.values()
    elif isinstance(data, list | tuple):
        entries = data
    else:
        return (data,)
    return (leaf for entry in entries for leaf in _leaves(entry))
