"""DeepSpeed's engine over Plait's: its names, its order of arguments, its return values. It
computes nothing itself.

A name that neither this nor the model has raises and says what to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from plait.cluster.topology import place
from plait.compat.deepspeed.loaders import StreamLoader, loader_of
from plait.compat.deepspeed.optimizer import EngineOptimizer
from plait.compat.deepspeed.refused import METHODS, missing
from plait.compat.deepspeed.saved import SavedState
from plait.engine.engine import Engine
from plait.errors import InputError, warn


class DeepSpeedEngine(SavedState):
    """Made by `deepspeed.initialize`. `plait` is the engine of Plait's that does the work."""

    def __init__(
        self,
        engine: Engine,
        *,
        trains: bool = True,
        config: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
    ) -> None:
        self.plait = engine
        self.config = config
        """As it was given to `initialize`."""
        self.optimizer = EngineOptimizer(engine, self.zero_grad) if trains else None
        """None where `initialize` was given none: the engine computes forwards alone."""
        self.lr_scheduler = engine.lr_scheduler if trains else None
        self.collate_fn = collate_fn
        self.training_dataloader: DataLoader[Any] | StreamLoader | None = None
        self.micro_steps = 0
        """Calls of `step`."""
        self.is_reduced = False
        """Whether the gradients that there are are those of a full step, over all ranks."""
        self._drop_last = drop_last
        self._applied = self._has_stepped = False
        self._counted = 0
        """Calls of `step` in the step that is not over."""
        self._boundary: bool | None = None
        self._in_no_sync = self._inside = False
        engine.optimizer.register_step_pre_hook(self._refuse_own_step)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "plait" not in vars(self):
            raise AttributeError(name)
        if name not in METHODS and hasattr(self.plait.model, name):
            return getattr(self.plait.model, name)
        raise missing("engine", name, METHODS)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output for one micro-batch."""
        self._tell_boundary()
        return self.plait(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Backward of a micro-batch's mean loss. Returns the loss divided by the accumulation
        steps, detached; as it is, and used as it is, without `scale_wrt_gas`. Raises InputError for
        `retain_graph`.
        """
        if retain_graph:
            raise InputError(
                "engine.backward(retain_graph=True): a micro-batch has one backward here; add its"
                " losses and call it once"
            )
        self._tell_boundary()
        count = self.gradient_accumulation_steps()
        self.is_reduced = False
        with self._training("backward"):
            self.plait.backward(loss if scale_wrt_gas else loss * count)
        self.is_reduced = self.plait.is_gradient_accumulation_boundary()
        return loss.detach() / count if scale_wrt_gas else loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the end of a step, update."""
        if lr_kwargs:
            raise InputError(
                "engine.step(lr_kwargs=...): the schedule is stepped without arguments; leave"
                " it out"
            )
        if self._in_no_sync:
            raise InputError(
                "engine.step() inside of engine.no_sync(): gradients there are not reduced; call it"
                " behind, after a backward"
            )
        self._tell_boundary()
        ends = self.plait.is_gradient_accumulation_boundary()
        self._applied = False
        with self._training("step"):
            self.plait.step()
        self._applied = ends and self.plait.was_step_applied()
        self._has_stepped |= ends
        self._counted = 0 if ends else self._counted + 1
        self.micro_steps += 1
        self.is_reduced = False

    @contextmanager
    def _training(self, call: str) -> Iterator[None]:
        """Around what may update parameters."""
        if self.optimizer is None:
            raise InputError(
                f'engine.{call}: deepspeed.initialize was given no optimizer; write "optimizer" in'
                " the configuration or pass optimizer="
            )
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _refuse_own_step(self, *_: Any) -> None:
        if not self._inside:
            raise InputError(
                "the optimizer's step() was called: call engine.step(), which reduces and clips"
                " gradients and updates"
            )

    def _tell_boundary(self) -> None:
        self.plait.set_gradient_accumulation_boundary(False if self._in_no_sync else self._boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches whose gradients wait for a later backward of the same step. At every ZeRO
        stage; stages 2 and 3 reduce them at once, which gives the same numbers. The last forward
        and backward of a step, and `step`, are outside.
        """
        if self._in_no_sync:
            raise InputError("engine.no_sync() inside of engine.no_sync(); one is enough")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False
            self._tell_boundary()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        self._tell_boundary()
        return self.plait.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide whether micro-batches are the last of their step, from now on, until this is
        called again.
        """
        self._boundary = is_boundary

    def zero_grad(self) -> None:
        """Drop the gradients of the step so far; warns where that loses micro-batches that `step`
        has counted, for `step` frees them.
        """
        lost = self.plait.sharded.guard.backwards
        if lost and self._counted and self.plait.rank == 0:
            warn(
                f"engine.zero_grad() drops the gradients of {lost} micro-batches of a step that is"
                f" not over (gradient_accumulation_steps {self.gradient_accumulation_steps()}), so"
                " the step is of the others alone; leave it out, engine.step() frees gradients"
            )
        self.plait.zero_grad()
        self.is_reduced = False

    def train(self, mode: bool = True) -> None:
        """Set training mode."""
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
        """A loader of this data-parallel rank's samples; shuffled in the route `train`, in order in
        `eval` and `predict`.
        """
        return loader_of(
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
        """Let go of the model, and of the process group if `initialize` made it."""
        self.plait.close()

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.plait.device

    @property
    def local_rank(self) -> int:
        """This process among those of its machine."""
        return place().local_rank

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self.plait.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.plait.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of different slices of the batch."""
        return self.plait.dp_size

    @property
    def mp_world_size(self) -> int:
        """Processes that share a layer's weights (tensor parallelism)."""
        return self.plait.mesh.layout.tp

    @property
    def data_parallel_group(self) -> Any:
        """torch's group of the processes with different slices of the batch; None for one."""
        return self.plait.mesh.group(*self.plait.parts.batch_axes)

    @property
    def global_steps(self) -> int:
        """Optimizer steps, skipped ones too."""
        return self.plait.global_steps

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite."""
        return self.plait.skipped_steps

    @property
    def global_samples(self) -> int:
        """Samples of all steps."""
        return self.plait.global_steps * self.train_batch_size()

    def get_data_parallel_rank(self) -> int:
        """Which slice of the batch this process reads."""
        return self.plait.dp_rank

    def train_batch_size(self) -> int:
        """Samples of a step, all ranks."""
        return self.plait.train_batch_size()

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch on one rank."""
        return self.plait.train_micro_batch_size_per_gpu()

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self.plait.gradient_accumulation_steps()

    def get_batch_info(self) -> tuple[int, int, int]:
        """(samples of a step, of a micro-batch, micro-batches of a step)."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def zero_optimization_stage(self) -> int:
        """ZeRO stage."""
        return self.plait.config.data_parallel.stage

    def zero_optimization(self) -> bool:
        """Whether a ZeRO stage above 0 is on."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded and freed after use."""
        return self.zero_optimization_stage() == 3

    def fp16_enabled(self) -> bool:
        """Whether blocks compute in float16."""
        return self.plait.config.precision.compute == "float16"

    def bfloat16_enabled(self) -> bool:
        """Whether blocks compute in bfloat16."""
        return self.plait.config.precision.compute == "bfloat16"

    def loss_scale(self) -> float:
        """The constant scale of the configuration; 0 is dynamic, or none.
        `engine.optimizer.loss_scale` is the present one.
        """
        scale = self.plait.config.precision.loss_scale
        return scale.static if scale is not None else 0

    def dynamic_loss_scale(self) -> bool:
        """Whether the scale follows from overflows."""
        return self.fp16_enabled() and self.loss_scale() == 0

    def gradient_clipping(self) -> float:
        """The largest norm; 0 does not clip."""
        return self.plait.config.gradient_clipping

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients over all ranks, unscaled, before clipping; None before
        the first step.
        """
        return self.plait.get_global_grad_norm() if self._has_stepped else None

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` updated the parameters."""
        return self._applied

    def get_lr(self) -> list[float]:
        """Current learning rate of every parameter group."""
        return self.plait.get_lr()

    def get_mom(self) -> list[Any]:
        """Betas, or momentum, of every parameter group."""
        return [
            group.get("betas", group.get("momentum")) for group in self.plait.optimizer.param_groups
        ]
