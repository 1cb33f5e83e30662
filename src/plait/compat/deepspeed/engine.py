"""DeepSpeed's engine interface on top of Plait's engine.

Names, arguments and return values are DeepSpeed's. A name that the engine does not define is looked
up in the model. A name that is not supported raises an error that names a replacement.

DeepSpeed's functions for parameters (`deepspeed.utils`, `zero.GatheredParameters`) receive only a
parameter. `find_parameter` looks up the parameter's engine in a registry.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from plait._torch.units import has_unreduced, sharded_modules
from plait.attributes import override_attributes
from plait.cluster.topology import place
from plait.compat.deepspeed.loaders import StreamLoader, build_loader
from plait.compat.deepspeed.refused import METHODS, missing
from plait.compat.deepspeed.saved import CheckpointMethods
from plait.engine.engine import Engine, OptimizerProxy
from plait.errors import InputError, warn
from plait.parallel.techniques.data_parallel import free_gathered


class DeepSpeedOptimizer(OptimizerProxy):
    """Optimizer that `deepspeed.initialize` returns. Only `engine.step()` may step it."""

    def __init__(self, engine: Engine, drop_gradients: Callable[[], None]) -> None:
        """Create a proxy of an engine's optimizer.

        Args:
            engine: Engine with the optimizer.
            drop_gradients: Drops the gradients of the current step.
        """
        super().__init__(engine)
        self._drop_gradients = drop_gradients

    overflow = OptimizerProxy.step_was_skipped

    @property
    def loss_scale(self) -> float:
        """Loss scale of the next backward; 1 without float16."""
        return self.engine.sharded.loss_scale

    cur_scale = loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the current step. `engine.step()` drops those that it used."""
        self._drop_gradients()

    def step(self, closure: Any = None) -> NoReturn:
        """Raise InputError: this call would skip the reduction, the clipping and the loss scale."""
        raise InputError(
            "optimizer.step(): call engine.step(), which reduces, clips and updates at the end of a"
            " step's micro-batches"
        )

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Raise InputError: states are sharded by the layout."""
        raise InputError(
            "optimizer.load_state_dict(): call engine.load_checkpoint(folder), which loads every"
            " layout's states"
        )


class DeepSpeedEngine(CheckpointMethods):
    """Engine that `deepspeed.initialize` returns. Its attribute `plait` is Plait's engine."""

    def __init__(
        self,
        engine: Engine,
        *,
        trains: bool = True,
        config: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
    ) -> None:
        """Wrap an engine of Plait.

        Args:
            engine: Engine of Plait.
            trains: False if `initialize` received no optimizer. The engine then only runs forward.
            config: Configuration as it was passed to `initialize`.
            collate_fn: Default function of the loaders that combines samples into a micro-batch.
            drop_last: Whether the loaders drop an incomplete last micro-batch.
        """
        self.plait = engine
        self.config = config
        self.optimizer = DeepSpeedOptimizer(engine, self.zero_grad) if trains else None
        self.lr_scheduler = engine.lr_scheduler if trains else None
        self.collate_fn = collate_fn
        self.training_dataloader: DataLoader[Any] | StreamLoader | None = None
        self.micro_steps = 0
        """Number of calls of `step`."""
        self.is_reduced = False
        """True if the current gradients are those of a full step, reduced over all ranks."""
        self._drop_last = drop_last
        self._applied = False
        """True if the last call of `step` updated the parameters."""
        self._has_stepped = False
        """True after the first optimizer step."""
        self._unfinished_steps = 0
        """Number of calls of `step` since the last optimizer step."""
        self._boundary: bool | None = None
        """Value of `set_gradient_accumulation_boundary`; None if the engine counts."""
        self._in_no_sync = False
        self._is_updating = False
        """True while the engine itself may call the optimizer."""
        engine.optimizer.register_step_pre_hook(self._refuse_optimizer_step)
        _ENGINES.add(self)

    def __getattr__(self, name: str) -> Any:
        # While the object is created or unpickled, it has no engine yet.
        if name.startswith("__") or "plait" not in vars(self):
            raise AttributeError(name)
        # Methods of the model such as `to` and `half` are refused; METHODS has their replacements.
        if name not in METHODS and hasattr(self.plait.model, name):
            return getattr(self.plait.model, name)
        raise missing("engine", name, METHODS)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's output for one micro-batch."""
        self._update_boundary()
        return self.plait(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Run backward of a micro-batch.

        Args:
            loss: Mean loss of the micro-batch.
            retain_graph: Must be False.
            scale_wrt_gas: Whether to divide the loss by the number of accumulation steps. If False,
                the script has divided it.

        Returns:
            The divided loss, detached.

        Raises:
            InputError: `retain_graph` is True.
        """
        if retain_graph:
            raise InputError(
                "engine.backward(retain_graph=True) is not supported, because a micro-batch has one"
                " backward; add up its losses, and call engine.backward(loss) once"
            )
        self._update_boundary()
        count = self.gradient_accumulation_steps()
        # It stays False if backward raises.
        self.is_reduced = False
        # optimizer_in_backward updates parameters here.
        with self._updating("backward"):
            # Plait's engine divides by the accumulation steps itself.
            self.plait.backward(loss if scale_wrt_gas else loss * count)
        self.is_reduced = self.plait.is_gradient_accumulation_boundary()
        if scale_wrt_gas:
            return loss.detach() / count
        return loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch. At the end of a step, update the parameters."""
        if lr_kwargs:
            raise InputError(
                "engine.step(lr_kwargs=...): the schedule is stepped without arguments; leave"
                " it out"
            )
        if self._in_no_sync:
            raise InputError(
                "engine.step() inside engine.no_sync(): gradients are not reduced there; call"
                " engine.set_gradient_accumulation_boundary(True), and run the last micro-batch and"
                " engine.step() outside"
            )
        self._update_boundary()
        # Read before the step, with which the next micro-batch begins.
        ends = self.plait.is_gradient_accumulation_boundary()
        self._applied = False
        with self._updating("step"):
            self.plait.step()
        self._applied = ends and self.plait.was_step_applied()
        self._has_stepped |= ends
        self._unfinished_steps += 1
        if ends:
            self._unfinished_steps = 0
        self.micro_steps += 1
        self.is_reduced = False

    @contextmanager
    def _updating(self, call: str) -> Iterator[None]:
        """Context manager for calls that may update parameters. It permits the optimizer's step."""
        if self.optimizer is None:
            raise InputError(
                f'engine.{call}: deepspeed.initialize was given no optimizer; write "optimizer" in'
                " the configuration or pass optimizer="
            )
        with override_attributes(self, _is_updating=True):
            yield

    def _refuse_optimizer_step(self, *_: Any) -> None:
        """Raise InputError if the script stepped the optimizer. Hook of the optimizer's step."""
        if not self._is_updating:
            raise InputError(
                "the optimizer's step() was called: call engine.step(), which reduces and clips"
                " gradients and updates"
            )

    def _update_boundary(self) -> None:
        """Set the accumulation boundary of Plait's engine before each call."""
        # Plait's engine forgets the boundary after each step; DeepSpeed's keeps it.
        boundary = self._boundary
        if self._in_no_sync:
            boundary = False
        self.plait.set_gradient_accumulation_boundary(boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Defer the reduction of gradients to a later backward of the step. Context manager.

        It is available at every ZeRO stage. Stages 2 and 3 reduce gradients immediately, with the
        same result. Call the last forward and backward of a step, and `step`, outside it.
        """
        if self._in_no_sync:
            raise InputError("engine.no_sync() inside engine.no_sync(): remove the inner one")
        try:
            with override_attributes(self, _in_no_sync=True):
                yield
        finally:
            self._update_boundary()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the current micro-batch is the last of its step."""
        self._update_boundary()
        return self.plait.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Treat all micro-batches, or none, as the last of a step until the next call."""
        self._boundary = is_boundary

    def zero_grad(self) -> None:
        """Drop the gradients of the current step.

        A script need not call it, because `step` frees gradients. A warning is issued if the call
        discards micro-batches for which `step` was called already.
        """
        # A script may call it after each `step`, as with torch's optimizers. That drops nothing,
        # except within an accumulation.
        lost = self.plait.sharded.guard.backwards
        if lost and self._unfinished_steps and self.plait.rank == 0:
            warn(
                f"engine.zero_grad() drops the gradients of {lost} micro-batches of a step that is"
                f" not over (gradient_accumulation_steps {self.gradient_accumulation_steps()}), so"
                " the step uses only the other micro-batches; leave it out, because engine.step()"
                " frees gradients"
            )
        self.plait.zero_grad(restart=False)
        self.is_reduced = False

    def train(self, mode: bool = True) -> None:
        """Set training mode, or evaluation mode if `mode` is False."""
        self.plait.train(mode)

    def eval(self) -> None:
        """Set evaluation mode."""
        self.plait.eval()

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any] | StreamLoader:
        """Return a loader of this data-parallel rank's micro-batches. See `build_loader`.

        Args:
            dataset: Data set.
            batch_size: Samples per micro-batch. If None, the engine's micro-batch size.
            route: "train" shuffles the samples; "eval" and "predict" do not.
            pin_memory: Whether to pin micro-batches in host memory, for a GPU.
            data_sampler: Sampler of the rank's samples.
            collate_fn: Combines samples into a micro-batch. If None, that of `initialize`.
            num_local_io_workers: Number of worker processes.
        """
        return build_loader(
            self.plait,
            dataset,
            collate_fn=collate_fn or self.collate_fn,
            batch_size=batch_size,
            sampler=data_sampler,
            shuffle=route == "train",
            drop_last=self._drop_last,
            workers=num_local_io_workers or 0,
            pin_memory=pin_memory,
        )

    def destroy(self) -> None:
        """Release the model, and destroy the process group if `initialize` created it."""
        self.plait.close()

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.plait.device

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return place().local_rank

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes."""
        return self.plait.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.plait.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks, which read different slices of the batch."""
        return self.plait.dp_size

    @property
    def mp_world_size(self) -> int:
        """Number of tensor-parallel processes, which share the weights of a layer."""
        return self.plait.mesh.layout.tp

    @property
    def data_parallel_group(self) -> Any:
        """Process group of the data-parallel ranks; None if there is only one."""
        return self.plait.mesh.group(*self.plait.parts.batch_axes)

    @property
    def global_steps(self) -> int:
        """Number of optimizer steps, including skipped ones."""
        return self.plait.global_steps

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because of non-finite gradients."""
        return self.plait.skipped_steps

    @property
    def global_samples(self) -> int:
        """Number of samples in all steps so far."""
        return self.plait.global_steps * self.train_batch_size()

    def get_data_parallel_rank(self) -> int:
        """Return the index of the slice of the batch that this process reads."""
        return self.plait.dp_rank

    def train_batch_size(self) -> int:
        """Return the samples per step, over all ranks."""
        return self.plait.train_batch_size()

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per micro-batch of a rank."""
        return self.plait.train_micro_batch_size_per_gpu()

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches per step."""
        return self.plait.gradient_accumulation_steps()

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (samples per step, samples per micro-batch, micro-batches per step)."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self.plait.config.data_parallel.stage

    def zero_optimization(self) -> bool:
        """Return True if the ZeRO stage is above 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Return True if gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return True if parameters are sharded and freed after use."""
        return self.zero_optimization_stage() == 3

    def fp16_enabled(self) -> bool:
        """Return True if blocks compute in float16."""
        return self.plait.config.precision.compute == "float16"

    def bfloat16_enabled(self) -> bool:
        """Return True if blocks compute in bfloat16."""
        return self.plait.config.precision.compute == "bfloat16"

    def loss_scale(self) -> float:
        """Return the constant loss scale of the configuration; 0 if it is dynamic or not used.

        `engine.optimizer.loss_scale` is the current one.
        """
        scale = self.plait.config.precision.loss_scale
        if scale is None:
            return 0
        return scale.static

    def dynamic_loss_scale(self) -> bool:
        """Return True if overflows determine the loss scale."""
        return self.fp16_enabled() and self.loss_scale() == 0

    def gradient_clipping(self) -> float:
        """Return the maximum of the global gradient norm; 0 does not clip."""
        return self.plait.config.gradient_clipping

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step over all ranks, unscaled and before clipping.

        Returns:
            None before the first step.
        """
        if not self._has_stepped:
            return None
        return self.plait.get_global_grad_norm()

    def was_step_applied(self) -> bool:
        """Return True if the last call of `step` updated the parameters."""
        return self._applied

    def get_lr(self) -> list[float]:
        """Return the current learning rate of every parameter group."""
        return self.plait.get_lr()

    def get_mom(self) -> list[Any]:
        """Return the betas, or the momentum, of every parameter group."""
        return [
            group.get("betas", group.get("momentum")) for group in self.plait.optimizer.param_groups
        ]


# Weak references, so that an engine is freed when the script drops it.
_ENGINES: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()
"""Engines of this process, for functions that receive only a parameter."""


def find_parameter(parameter: nn.Parameter) -> tuple[DeepSpeedEngine, nn.Parameter] | None:
    """Find the engine of a parameter, and free the gathered parameters of its model.

    Args:
        parameter: A parameter of the model, or a gathered copy of one.

    Returns:
        The engine, and the parameter that the engine's optimizer updates. For a gathered copy this
        is the shard that the copy replaces. None if no engine has the parameter.

    Raises:
        InputError: The call is between the micro-batches of a step.
    """
    for engine in list(_ENGINES):
        names = [
            name for name, candidate in engine.module.named_parameters() if candidate is parameter
        ]
        # While a module is gathered, its shards are in no module, but `known` has their identities.
        if not names and id(parameter) not in engine.plait.sharded.guard.known:
            continue
        if has_unreduced(sharded_modules(engine.module)):
            raise InputError(
                f"a parameter of shape {tuple(parameter.shape)} was requested between the"
                " micro-batches of a step, whose gradients are not reduced yet; request it after"
                " engine.step(), or after the backward of the step's last micro-batch"
            )
        free_gathered(engine.module)
        if names:
            # The name now refers to the shard.
            return engine, engine.module.get_parameter(names[0])
        return engine, parameter
    return None


def require_parameter(parameter: nn.Parameter) -> tuple[DeepSpeedEngine, nn.Parameter]:
    """Find the engine of a parameter. See `find_parameter`.

    Raises:
        InputError: No engine has the parameter.
    """
    match = find_parameter(parameter)
    if match is None:
        raise InputError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no model that was passed to"
            " deepspeed.initialize; pass a parameter of engine.module"
        )
    return match
