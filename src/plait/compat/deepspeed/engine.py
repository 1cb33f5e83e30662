"""DeepSpeed's engine over Plait's: its names, its order of arguments, its return values. It computes nothing itself.

A name that neither this nor the model has raises and says what to use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from plait import exact
from plait.cluster.topology import place
from plait.compat.deepspeed.optimizer import EngineOptimizer
from plait.compat.deepspeed.refused import METHODS, missing
from plait.engine.engine import Engine
from plait.engine.weights import full_weights, load_weights_of
from plait.errors import CheckpointError, InputError
from plait.parallel.data.data_parallel import free_gathered


class DeepSpeedEngine:
    """Made by `deepspeed.initialize`. `plait` is the engine of Plait's that does the work."""

    def __init__(self, engine: Engine, training_dataloader: DataLoader[Any] | None = None) -> None:
        self.plait = engine
        self.optimizer = EngineOptimizer(engine)
        self.lr_scheduler = engine.lr_scheduler
        self.training_dataloader = training_dataloader
        self.micro_steps = 0
        """Calls of `step`."""
        self.is_reduced = False
        """Whether the gradients that there are are those of a full step, over all ranks."""
        self._boundary: bool | None = None
        self._in_no_sync = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "plait" not in vars(self):
            raise AttributeError(name)
        if name not in METHODS and hasattr(self.plait.model, name):
            return getattr(self.plait.model, name)
        raise missing("engine", name, METHODS)

    # ---- the three calls ------------------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output for one micro-batch."""
        self._tell_boundary()
        return self.plait(*inputs, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of a micro-batch's mean loss. Returns the loss divided by the accumulation steps, detached; as it is, and used as it is,
        without `scale_wrt_gas`. Raises InputError for `retain_graph`."""
        if retain_graph:
            raise InputError("engine.backward(retain_graph=True): a micro-batch has one backward here; add its losses and call it once")
        self._tell_boundary()
        count = self.gradient_accumulation_steps()
        self.is_reduced = False
        self.plait.backward(loss if scale_wrt_gas else loss * count)
        self.is_reduced = self.plait.is_gradient_accumulation_boundary()
        return loss.detach() / count if scale_wrt_gas else loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the end of a step, update."""
        if lr_kwargs:
            raise InputError("engine.step(lr_kwargs=...): the schedule is stepped without arguments; leave it out")
        if self._in_no_sync:
            raise InputError("engine.step() inside of engine.no_sync(): gradients there are not reduced; call it behind, after a backward")
        self._tell_boundary()
        self.plait.step()
        self.micro_steps += 1
        self.is_reduced = False

    def _tell_boundary(self) -> None:
        self.plait.set_gradient_accumulation_boundary(False if self._in_no_sync else self._boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches whose gradients wait for a later backward of the same step. At every ZeRO stage; stages 2 and 3 reduce them at
        once, which gives the same numbers. The last forward and backward of a step, and `step`, are outside."""
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
        """Decide whether micro-batches are the last of their step, from now on, until this is called again."""
        self._boundary = is_boundary

    def zero_grad(self) -> None:
        """Drop the gradients of the step so far."""
        self.plait.zero_grad()
        self.is_reduced = False

    def train(self, mode: bool = True) -> None:
        """Set training mode."""
        self.plait.train(mode)

    def eval(self) -> None:
        """Set evaluation mode."""
        self.plait.eval()

    # ---- facts ----------------------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The user's model, sharded in place."""
        return self.plait.model

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
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def zero_optimization_stage(self) -> int:
        """ZeRO stage."""
        return self.plait.config.data_parallel.stage

    def zero_optimization(self) -> bool:
        """Whether a ZeRO stage above 0 is on."""
        return self.zero_optimization_stage() > 0

    def fp16_enabled(self) -> bool:
        """Whether blocks compute in float16."""
        return self.plait.config.precision.compute == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether blocks compute in bfloat16."""
        return self.plait.config.precision.compute == torch.bfloat16

    def loss_scale(self) -> float:
        """The constant scale of the configuration; 0 is dynamic, or none. `engine.optimizer.loss_scale` is the present one."""
        scale = self.plait.config.precision.loss_scale
        return scale.static if scale is not None else 0

    def gradient_clipping(self) -> float:
        """The largest norm; 0 does not clip."""
        return self.plait.config.gradient_clipping

    def get_global_grad_norm(self) -> float:
        """Norm of the last step's gradients over all ranks, unscaled, before clipping."""
        return self.plait.get_global_grad_norm()

    def was_step_applied(self) -> bool:
        """Whether the last step updated the parameters."""
        return self.plait.was_step_applied()

    def get_lr(self) -> list[float]:
        """Current learning rate of every parameter group."""
        return self.plait.get_lr()

    def get_mom(self) -> list[Any]:
        """Betas, or momentum, of every parameter group."""
        return [group.get("betas", group.get("momentum")) for group in self.plait.optimizer.param_groups]

    # ---- state ----------------------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint of Plait's, which loads on any layout, as `save_dir/tag` (default `global_step10`). Collective. Returns True.
        Raises CheckpointError, and InputError for what cannot be honoured."""
        if not save_latest:
            raise InputError("engine.save_checkpoint(save_latest=False): the newest checkpoint is the latest; save into another folder")
        if exclude_frozen_parameters:
            raise InputError("engine.save_checkpoint(exclude_frozen_parameters=True): a checkpoint holds all parameters; leave it out")
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"
        self.plait.save_checkpoint(save_dir, tag=name, client_state=client_state or {})
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from `load_dir/tag`, or from the latest. Returns its path and the client state; (None, None) where there is none.
        Collective. `load_module_only` loads the weights alone. Raises CheckpointError, and InputError for what cannot be honoured."""
        if not load_module_strict or custom_load_fn is not None:
            raise InputError(
                "engine.load_checkpoint(load_module_strict=False, custom_load_fn=...): a checkpoint is of exactly this model; leave them "
                "out, or change names in what plait.load_trained reads"
            )
        if not load_module_only and not (load_optimizer_states and load_lr_scheduler_states):
            raise InputError(
                "engine.load_checkpoint(load_optimizer_states=False, load_lr_scheduler_states=False): optimizer and schedule are loaded "
                "together, or neither; use load_module_only=True"
            )
        name = str(tag) if tag is not None else None
        if load_module_only:
            reader = load_weights_of(self.plait, load_dir, tag=name)
            if reader is None:
                return None, None
            return str(reader.path), exact.decode(reader.manifest.metadata["client_state"], where="client_state")
        self.is_reduced = False
        found = self.plait.load_checkpoint(load_dir, tag=name)
        return (str(found[0]), found[1]) if found is not None else (None, None)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's state with full tensors, on every rank. Collective: call it on every rank, also where one alone writes it."""
        if self.plait.mesh.layout.pp > 1:
            raise InputError("engine.module_state_dict(): a rank of a pipeline has a part of the model; call engine.save_16bit_model")
        free_gathered(self.module)
        frozen = {n for n, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        found = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in self.module.state_dict().items()
        }
        return {name: value for name, value in found.items() if not (exclude_frozen_parameters and name in frozen)}

    state_dict = module_state_dict

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the full weights, in the dtype of the computation, with torch.save. Collective; the first process needs memory for all of
        them. Returns True. Raises CheckpointError, on that process, where the file cannot be written."""
        dtype = self.plait.config.precision.compute
        weights = full_weights(self.plait, trained=exclude_frozen_parameters)
        if self.plait.rank == 0:
            path = Path(save_dir) / save_filename
            cast = {name: value.to(dtype) if dtype and value.is_floating_point() else value for name, value in weights.items()}
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(cast, path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
        return True

    def empty_partition_cache(self) -> None:
        """Free parameters that are gathered."""
        free_gathered(self.module)

    def destroy(self) -> None:
        """Let go of the model, and of the process group if `initialize` made it."""
        self.plait.close()


class PipelineEngine(DeepSpeedEngine):
    """Of a `PipelineModule`: full steps only."""

    _batches: Iterator[Any] | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One optimizer step over the next micro-batches, `(inputs, labels)` each, of the iterator, or of `training_data` again and again.
        Returns the mean over micro-batches and data-parallel ranks; 0-dimensional."""
        if data_iter is None:
            if self._batches is None:
                if self.training_dataloader is None:
                    raise InputError("engine.train_batch(): pass an iterator, or training_data= to initialize")
                self._batches = _repeated(self.training_dataloader)
            data_iter = self._batches
        loss = self.plait.train_batch(iter(data_iter)).loss
        self.micro_steps += self.gradient_accumulation_steps()
        return loss

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise InputError("engine(...) of a pipeline: call engine.train_batch(iterator), which runs full steps")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise InputError("engine.backward of a pipeline: call engine.train_batch(iterator), which runs full steps")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        raise InputError("engine.step of a pipeline: call engine.train_batch(iterator), which runs full steps")


def _repeated(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader
