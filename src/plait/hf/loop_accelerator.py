"""Accelerate's Accelerator for your own training loop, over Plait's engine: `from plait.hf import
Accelerator`.

`prepare` shards the model in place, and it stays your own object. `accelerator.backward`, the
optimizer's `step` and the schedule's do what they do under Accelerate. What cannot be done raises,
and says what to use.
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
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from plait.checkpoint.model_content import keep_what_is_trained
from plait.cluster.topology import place
from plait.data.split_rows import refuse_other_rows
from plait.engine.build import initialize
from plait.errors import InputError, warn
from plait.hf.accelerator import FULL_WEIGHTS
from plait.hf.accelerator import Accelerator as RanksAccelerator
from plait.hf.batches import plan_of
from plait.hf.checkpoints import has_adapters
from plait.hf.loop_checkpoints import DrawnOrder, LoopCheckpoints
from plait.hf.loop_refused import refuse_arguments
from plait.hf.loop_settings import (
    checked_config,
    precision_of,
    refuse_another_clipping,
    resolved_of,
)
from plait.hf.optimizer import EngineOptimizer
from plait.hf.settings import ConfigSource
from plait.sharded.model import owner_of
from plait.sharded.shards_as_weights import refuse_shards_as_weights

_PREPARE = "accelerator.prepare(model, optimizer, ...) does it"


class Accelerator(LoopCheckpoints, RanksAccelerator):
    """`accelerate.Accelerator` with Plait's layouts; processes are the data-parallel ranks."""

    _begins = _PREPARE

    def __init__(
        self,
        *,
        plait_config: ConfigSource | None = None,
        mixed_precision: str | None = None,
        deepspeed_plugin: Any = None,
        **arguments: Any,
    ) -> None:
        """`plait_config`: a path to JSON or YAML, a mapping or a Config; a DeepSpeed file is valid
        as it is. Without one the model is replicated. `deepspeed_plugin` gives its
        `deepspeed_config`, and needs no DeepSpeed. `arguments` are Accelerate's. Raises ConfigError
        or InputError for what cannot be honoured.
        """
        refuse_arguments(arguments)
        if plait_config is not None and deepspeed_plugin is not None:
            raise InputError(
                "plait.hf.Accelerator was given plait_config= and deepspeed_plugin=; leave one of"
                " them out"
            )
        source = plait_config if deepspeed_plugin is None else deepspeed_plugin.deepspeed_config
        here = place()
        self._precision = precision_of(mixed_precision)
        self.own_rank = here.rank
        self.engine = None
        self.present = None
        self.references = []
        self._alone = self._own_counts = False
        self.evaluates = True  # a rank that has no batch of a stream must be known, in every loop
        self._holding = False
        self._orders: list[DrawnOrder] = []
        steps = arguments.get("gradient_accumulation_steps", 1)
        plugin = arguments.get("gradient_accumulation_plugin")
        self._steps = int(plugin.num_steps if plugin is not None else steps)
        self._config = checked_config(source, precision=self._precision, accumulation=self._steps)
        self.resolved = self._resolved(micro=1, hidden_size=None)
        self.layout = self.resolved.layout
        super().__init__(mixed_precision="no", **arguments)
        if self.gradient_accumulation_steps != self._steps:
            raise InputError(
                f"accelerate launch set {self.gradient_accumulation_steps} accumulation steps, and"
                f" the script has {self._steps}; write gradient_accumulation_steps= in Accelerator"
            )

    def _resolved(self, *, micro: int, hidden_size: int | None) -> Any:
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
        """That of the argument; the engine computes in it, and there is no autocast."""
        return self._precision

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Loaders of this rank's part, the model sharded in place, its optimizer and schedules; in
        the order of the arguments. The model that the optimizer holds is trained; another one
        computes forwards alone. Collective. Raises ConfigError, ModelError, InputError.
        """
        made: dict[int, Any] = {
            id(one): self.prepare_data_loader(one) for one in args if isinstance(one, DataLoader)
        }
        optimizers = [
            one
            for one in args
            if isinstance(one, torch.optim.Optimizer) and not isinstance(one, LoopOptimizer)
        ]
        models = [one for one in args if isinstance(one, nn.Module) and owner_of(one) is None]
        trained = self._trained(models, optimizers)
        if trained is not None:
            made[id(optimizers[0])] = self._begin(
                trained, optimizers[0], [one for one in args if isinstance(one, DataLoader)]
            )
        for model in models:
            if model is not trained:
                self.prepare_model(model, evaluation_mode=True)
        for one in args:
            if isinstance(one, LRScheduler):
                made[id(one)] = self.prepare_scheduler(one)
        found = tuple(made.get(id(one), one) for one in args)
        return found if len(found) > 1 else found[0]

    def _trained(
        self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]
    ) -> nn.Module | None:
        if not optimizers:
            return None
        if len(optimizers) > 1 or self.engine is not None:
            raise InputError(
                "plait.hf.Accelerator trains one model with one optimizer, of several parameter"
                " groups where they differ; for several models call plait.parallelize(model,"
                " config) for each"
            )
        held = {
            id(parameter) for group in optimizers[0].param_groups for parameter in group["params"]
        }
        found = [
            model
            for model in models
            if any(id(parameter) in held for parameter in model.parameters())
        ]
        if len(found) != 1:
            raise InputError(
                f"accelerator.prepare was given an optimizer over parameters of {len(found)} of the"
                " models that were given beside it; build the optimizer over model.parameters(),"
                " and prepare both in one call"
            )
        return found[0]

    def _begin(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loaders: list[Any]
    ) -> LoopOptimizer:
        sizes = {loader.batch_size for loader in loaders[:1] if loader.batch_size}
        hidden = getattr(getattr(model, "config", None), "hidden_size", None)
        self.resolved = self._resolved(micro=sizes.pop() if sizes else 1, hidden_size=hidden)
        if has_adapters(model):
            keep_what_is_trained(model)
        self.engine = initialize(model, self.resolved, optimizer=optimizer)
        refuse_shards_as_weights(model, remedy=FULL_WEIGHTS)
        made = LoopOptimizer(self)
        self._models.append(model)
        self._optimizers.append(made)
        self._say()
        return made

    def prepare_model(
        self, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        """For forwards alone. A model that is trained: `prepare`."""
        if not evaluation_mode and owner_of(model) is None:
            raise InputError(
                "accelerator.prepare_model: a model is trained with its optimizer; call"
                " accelerator.prepare(model, optimizer)"
            )
        return super().prepare_model(model, evaluation_mode=evaluation_mode)

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> NoReturn:
        """Refused: it is prepared with its model."""
        raise InputError(
            "accelerator.prepare_optimizer: call accelerator.prepare(model, optimizer), both in one"
            " call"
        )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A schedule that moves with the optimizer's steps, as many times as there are
        data-parallel ranks, as under Accelerate.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            return scheduler
        made = LoopScheduler(
            scheduler, self._optimizers, step_with_optimizer=self.step_scheduler_with_optimizer
        )
        made.times = self.num_processes
        self._schedulers.append(made)
        return made

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader of this rank's part, in Accelerate's order. A rank that has no batch in the last
        round computes on another's, which counts for nothing in `backward` and
        `gather_for_metrics`.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return data_loader
        if isinstance(data_loader.dataset, IterableDataset):
            if data_loader.num_workers and self.num_processes > 1 and place().rank == 0:
                warn(
                    "an iterable data set is read without workers, which would not say whose rank"
                    " has no batch left"
                )
        else:
            workers = data_loader.num_workers
            context = data_loader.multiprocessing_context
            refuse_other_rows(
                data_loader.dataset, device=self.device, workers=workers, context=context
            )
            if not self.use_seedable_sampler:
                self._share_order(data_loader)
        made = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        made._is_accelerate_prepared = True
        return made

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader of the rest of an epoch, in that epoch's order; `dataloader` itself goes on with
        the next one.
        """
        made = super().skip_first_batches(dataloader, num_batches)
        made.iteration = dataloader.iteration
        dataloader.iteration += 1
        return made

    def _order(self) -> dict[str, Any]:
        return {
            "use_seedable_sampler": self.use_seedable_sampler,
            "data_seed": self.dataloader_config.data_seed,
        }

    def _share_order(self, loader: Any) -> None:
        """All ranks draw the first rank's order, which is Accelerate's."""
        batches = loader.batch_sampler
        sampler: Any = getattr(batches, "sampler", None)
        if not hasattr(sampler, "generator"):
            return
        if sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        state = [sampler.generator.get_state()]
        broadcast_object_list(state)
        sampler.generator.set_state(state[0])
        batches.sampler = DrawnOrder(sampler)
        self._orders.append(batches.sampler)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """A micro-batch; every `gradient_accumulation_steps`-th, and the last of an epoch, ends a
        step.
        """
        self._do_sync()
        with self._held(not self.sync_gradients):
            yield

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Gradients of backwards inside wait for one outside."""
        with self._held(True):
            yield

    @contextmanager
    def _held(self, holding: bool) -> Iterator[None]:
        before = self._holding
        self._holding = holding
        self._say()
        try:
            yield
        finally:
            self._holding = before
            self._say()

    def _say(self) -> None:
        """Before the forward of a micro-batch: whether its gradients are reduced."""
        if self.engine is not None:
            self.engine.set_gradient_accumulation_boundary(not self._holding)
            self.engine.sharded.before_microbatch(last=not self._holding)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of a micro-batch's mean loss, divided by `gradient_accumulation_steps`;
        gradients are means over the ranks that have a batch of their own.
        """
        engine = self._prepared("backward")
        if kwargs:
            raise InputError(
                f"accelerator.backward({', '.join(kwargs)}=): a micro-batch has one backward, and"
                " no other argument"
            )
        if engine.sharded.guard.reduced:
            raise InputError(
                "accelerator.backward after accelerator.clip_grad_norm_: the step's gradients are"
                " complete, and would be summed again; call optimizer.step(), or"
                " optimizer.zero_grad(), first"
            )
        ranks = engine.dp_size
        present = self._present()
        factor = ranks / present if self.process_index < present else 0.0
        self._say()
        engine.backward(loss * (factor * self._steps / self.gradient_accumulation_steps))

    def _present(self) -> int:
        """How many data-parallel ranks, the first ones, have a batch of their own now."""
        loader = self.gradient_state.active_dataloader
        plan = plan_of(loader) if loader is not None and loader.end_of_dataloader else None
        return plan.present_last if plan is not None else self.num_processes

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """The norm of the gradients over all ranks, before clipping, each element counted once; the
        optimizer's step clips by it. After a step's last backward. Collective. Raises InputError
        for a part of the parameters, which would be clipped by itself.
        """
        engine = self._prepared("clip_grad_norm_")
        if norm_type != 2:
            raise InputError(
                f"accelerator.clip_grad_norm_(norm_type={norm_type}): Plait clips by the Euclidean"
                " norm; leave it out"
            )
        if not self.sync_gradients or self._holding:
            raise InputError(
                "accelerator.clip_grad_norm_ before a step's last backward clips gradients that are"
                " not complete; call it inside of `if accelerator.sync_gradients:`"
            )
        given = {
            id(one)
            for one in ([parameters] if isinstance(parameters, torch.Tensor) else list(parameters))
        }
        left = [
            name
            for name, one in engine.model.named_parameters()
            if one.requires_grad and id(one) not in given
        ]
        if left:
            raise InputError(
                f"accelerator.clip_grad_norm_ was not given {left[0]} ({len(left)} trained"
                " parameters in all); pass model.parameters() of the prepared model: the step"
                " clips all of them by one norm"
            )
        refuse_another_clipping(self._config, max_norm)
        engine.sharded.finish_reduction()
        norm = engine.sharded.grad_norm() / engine.sharded.loss_scale
        engine.stepper.clipping = 0.0 if math.isinf(max_norm) else float(max_norm)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        """Refused."""
        raise InputError(
            "accelerator.clip_grad_value_ is not there; use accelerator.clip_grad_norm_"
        )

    def unscale_gradients(self, optimizer: Any = None) -> NoReturn:
        """Refused: the step unscales."""
        raise InputError(
            "accelerator.unscale_gradients: take it out; the step and accelerator.clip_grad_norm_"
            " unscale"
        )

    def maybe_context_parallel(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise InputError(
            "accelerator.maybe_context_parallel: use plait.initialize and engine.train_batch with"
            ' "parallel": {"cp": 2}'
        )

    def join_uneven_inputs(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise InputError(
            "accelerator.join_uneven_inputs: not needed, a rank without a batch counts for nothing;"
            " take it out"
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Rows of all data-parallel ranks, each sample's once, also where their numbers differ;
        objects in a list. Collective.
        """
        own = self.process_index < self._present()
        if not use_gather_object and _is_of_tensors(input_data):
            return recursively_apply(
                lambda one: self._rows(one, own=own), input_data, error_on_other_type=True
            )
        return super().gather_for_metrics(input_data if own else [], use_gather_object=True)

    def _rows(self, tensor: torch.Tensor, *, own: bool) -> Any:
        tensor = tensor.detach() if tensor.ndim else tensor.detach()[None]
        return self.gather_first(tensor, len(tensor) if own else 0)

    def free_memory(self, *objects: Any) -> Any:
        """Let go of the model too; another one may be prepared then."""
        if self.engine is not None:
            self.engine.close()
        self.engine = None
        self._orders = []
        return super().free_memory(*objects)

    clear = free_memory


class LoopOptimizer(EngineOptimizer):
    """The optimizer of an Accelerate loop: `step` and `zero_grad` act at the end of a step's
    micro-batches.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator._prepared("prepare"))
        self._accelerator = accelerator

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Reduce, clip as `accelerator.clip_grad_norm_` was told, and update. Collective."""
        if closure is not None:
            raise InputError(
                "optimizer.step(closure): gradients are reduced once a step; call it without a"
                " closure"
            )
        if not self._accelerator.sync_gradients:
            return
        before = self.engine.config.gradient_clipping
        try:
            super().step()
        finally:
            self.engine.stepper.clipping = before
            self._accelerator._say()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step so far at its end, as Accelerate does; `step` has dropped
        those that it used.
        """
        lost = self.engine.sharded.guard.backwards
        if not lost or not self._accelerator.sync_gradients:
            return
        if lost > 1 and place().rank == 0:
            warn(
                f"optimizer.zero_grad() drops the gradients of {lost} micro-batches that no step"
                " has used; call it after optimizer.step()"
            )
        self.engine.zero_grad()

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Refused: states are parts, cut as the layout says."""
        raise InputError(
            "optimizer.load_state_dict(): call accelerator.load_state(folder), which loads every"
            " layout's states"
        )


class LoopScheduler(AcceleratedScheduler):
    """Accelerate's, whose steps follow the data-parallel ranks and not the processes."""

    times = 1
    """Steps of the schedule in one of the optimizer."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """One step of the schedule for every data-parallel rank, where the optimizer has
        stepped.
        """
        if not (self.step_with_optimizer and self.gradient_state.sync_gradients):
            super().step(*args, **kwargs)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(self.times):
            if self.scheduler.last_epoch < getattr(self.scheduler, "total_steps", math.inf):
                self.scheduler.step(*args, **kwargs)


def _is_of_tensors(data: Any) -> bool:
    def leaves(one: Any) -> Iterable[Any]:
        if isinstance(one, dict):
            return (leaf for entry in one.values() for leaf in leaves(entry))
        if isinstance(one, list | tuple):
            return (leaf for entry in one for leaf in leaves(entry))
        return (one,)

    return all(isinstance(leaf, torch.Tensor) for leaf in leaves(data))
