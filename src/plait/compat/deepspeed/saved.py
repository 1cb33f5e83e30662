"""Checkpoints and full weights of DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from plait import exact
from plait._torch.tensors import local_tensor, local_window
from plait.checkpoint.load import Reader
from plait.cluster.small_messages import all_gather_objects, broadcast_object
from plait.compat.deepspeed.refused import refuse_arguments
from plait.engine.engine import Engine
from plait.engine.weights import full_weights, load_weights_of
from plait.errors import CheckpointError, InputError, warn
from plait.parallel.techniques.data_parallel import free_gathered
from plait.sizes import dtype_of

_PREFIX = "module."
"""Prefix of names in a state of DeepSpeed's engine, which is a module that contains the model."""


@torch.no_grad()
def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a full copy of a tensor on this device. Collective if the tensor is sharded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


@torch.no_grad()
def write_full(target: torch.Tensor, value: torch.Tensor) -> None:
    """Write a full value to a tensor, or this rank's part of it to a shard."""
    if value.shape != target.shape:
        raise InputError(
            f"a value of shape {tuple(value.shape)} was given for a parameter of shape"
            f" {tuple(target.shape)}; pass a value of the parameter's shape"
        )
    if isinstance(target, DTensor):
        value = value[local_window(target)]
    local_tensor(target.detach()).copy_(value)


def refuse_in_step(engine: Engine, call: str) -> None:
    """Raise InputError if a call would change weights between a backward and its step."""
    if engine.sharded.guard.backwards:
        raise InputError(
            f"{call} changes weights between a backward and its engine.step(), so the gradients"
            " would belong to other weights; call it after engine.step()"
        )


class CheckpointMethods:
    """Methods of `DeepSpeedEngine` for checkpoints and full weights."""

    plait: Engine
    is_reduced: bool

    @property
    def module(self) -> nn.Module:
        """The user's model, sharded in place."""
        return self.plait.model

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | float | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a Plait checkpoint, which loads on any layout. Collective.

        Args:
            save_dir: Folder of checkpoints.
            tag: Name of the checkpoint in the folder. The default is like `global_step10`. The
                first process's tag is used on all ranks.
            client_state: State of the script. The first process's state is saved.
            save_latest: Must be True.
            exclude_frozen_parameters: Must be False.

        Returns:
            True, as DeepSpeed does.

        Raises:
            CheckpointError: The checkpoint cannot be written.
            InputError: An argument is not supported.
        """
        if not save_latest:
            raise InputError(
                "engine.save_checkpoint(save_latest=False): LATEST always names the newest"
                " checkpoint; save into another folder"
            )
        if exclude_frozen_parameters:
            raise InputError(
                "engine.save_checkpoint(exclude_frozen_parameters=True): a checkpoint holds all"
                " parameters; leave it out"
            )
        local_name = str(tag) if tag is not None else f"global_step{self.plait.global_steps}"
        name = local_name
        if self.plait.world_size > 1:
            # Tags may differ between ranks, for example if they contain the time.
            name = broadcast_object(local_name)
        if name != local_name:
            warn(
                f"engine.save_checkpoint(tag={local_name!r}): processes passed different tags;"
                f" the checkpoint has that of the first process, {name!r}"
            )
        self.plait.save_checkpoint(str(save_dir), tag=name, client_state=client_state or {})
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a Plait checkpoint. Collective.

        Args:
            load_dir: Folder of checkpoints.
            tag: Name of the checkpoint. If None, the latest.
            load_module_strict: Must be True.
            load_optimizer_states: Whether to load the optimizer and the schedule. Without them, the
                weights and the number of steps are loaded.
            load_lr_scheduler_states: Must equal `load_optimizer_states`.
            load_module_only: Whether to load only the weights.
            custom_load_fn: Must be None.

        Returns:
            The path of the checkpoint and its client state. (None, None), with a warning, if the
            folder contains no checkpoint.

        Raises:
            CheckpointError: The checkpoint is damaged or of another model, or DeepSpeed wrote it.
            InputError: An argument is not supported.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise InputError(
                "engine.load_checkpoint(load_module_strict=False, custom_load_fn=...): a checkpoint"
                " must match the model exactly; leave both arguments out. If the names differ, load"
                " the checkpoint with plait.load_trained into a model that has its names, rename"
                " those weights, and pass them to engine.load_state_dict"
            )
        if not load_module_only and load_optimizer_states != load_lr_scheduler_states:
            raise InputError(
                "engine.load_checkpoint(load_optimizer_states=..., load_lr_scheduler_states=...):"
                " the optimizer and the LR schedule are loaded together; pass the same value for"
                " both"
            )
        name = str(tag) if tag is not None else None
        _refuse_deepspeed_checkpoint(load_dir, name)
        if load_module_only or not load_optimizer_states:
            reader = self._load_weights(load_dir, name)
            if reader is None:
                return self._warn_no_checkpoint(load_dir)
            metadata = reader.manifest.metadata
            if not load_module_only:
                self.plait.global_steps = metadata["global_steps"]
                self.plait.skipped_steps = metadata["skipped_steps"]
            return str(reader.path), exact.decode(metadata["client_state"], where="client_state")

        self.is_reduced = False
        loaded = self.plait.load_checkpoint(str(load_dir), tag=name)
        if loaded is None:
            return self._warn_no_checkpoint(load_dir)
        return str(loaded[0]), loaded[1]

    def _load_weights(self, load_dir: str | Path, tag: str | None) -> Reader | None:
        if self.plait.sharded.guard.backwards:
            # The gradients belong to the weights before.
            self.plait.zero_grad()
        self.is_reduced = False
        return load_weights_of(self.plait, load_dir, tag=tag)

    def _warn_no_checkpoint(self, load_dir: str | Path) -> tuple[None, None]:
        if self.plait.rank == 0:
            warn(f"engine.load_checkpoint: {load_dir} holds no checkpoint, so nothing was loaded")
        return None, None

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return a full copy of the model's state on every rank. Collective.

        All ranks must call it, even if only one of them writes the result.

        Args:
            destination: Must be None.
            prefix: Prefix of the names in the result.
            keep_vars: Must be False.
            exclude_frozen_parameters: Whether to omit parameters that require no gradient.

        Raises:
            InputError: An argument is not supported, or the model is a pipeline, of which each rank
                has only a part.
        """
        refuse_arguments(
            "DeepSpeedEngine.module_state_dict",
            {
                "destination": "update a dictionary with what is returned",
                "keep_vars": "what is returned has no gradient",
            },
            destination=destination,
            keep_vars=keep_vars or None,
        )
        if self.plait.mesh.layout.pp > 1:
            raise InputError(
                "engine.module_state_dict(): a rank of a pipeline has a part of the model; call"
                " engine.save_16bit_model"
            )
        # Shards replace the gathered parameters in the modules.
        free_gathered(self.module)
        frozen = self._frozen_names()
        state = {}
        for name, value in self.module.state_dict().items():
            if exclude_frozen_parameters and name in frozen:
                continue
            if isinstance(value, torch.Tensor):
                value = full_tensor(value)
            state[f"{prefix}{name}"] = value
        return state

    def _frozen_names(self) -> set[str]:
        """Return the names of the parameters that require no gradient."""
        return {
            name
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad
        }

    def state_dict(self) -> dict[str, Any]:
        """Return `module_state_dict` with DeepSpeed's prefix `module.`. Collective."""
        return self.module_state_dict(prefix=_PREFIX)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load full weights into this rank's shards. Optimizer states do not change.

        Args:
            state_dict: All weights, on every rank. The names may have the prefix `module.`.
            strict: See `torch.nn.Module.load_state_dict`.

        Raises:
            InputError: The call is between a backward and its step.
        """
        refuse_in_step(self.plait, "engine.load_state_dict")
        free_gathered(self.module)
        # A model may itself have a child `module`, so the prefix is removed only from all names.
        prefix = ""
        if all(name.startswith(_PREFIX) for name in state_dict):
            prefix = _PREFIX
        weights = {name.removeprefix(prefix): value for name, value in state_dict.items()}
        return self.module.load_state_dict(weights, strict=strict)

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the entry `module` of a checkpoint. See `load_state_dict`."""
        self.load_state_dict(checkpoint["module"], strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full weights with torch.save, in the dtype of the computation. Collective.

        The first process writes the file and needs memory for all weights.

        Returns:
            True, as DeepSpeed does.

        Raises:
            CheckpointError: The file cannot be written. It is raised on the first process.
        """
        weights = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if weights is not None:
            path = Path(save_dir) / save_filename
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(weights, path)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be written: {error.strerror or error}; free disk space, or pass"
                    " another folder"
                ) from error
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the full weights on the CPU of the first process, None on others. Collective.

        The weights have the dtype of the computation. The method is available at every ZeRO stage.
        Scripts call it, although it is private in DeepSpeed.
        """
        frozen = self._frozen_names()
        # The weights are those of all stages, but a rank knows only its own frozen parameters.
        group = self.plait.mesh.group("pp")
        if group is not None and exclude_frozen_parameters:
            frozen = set().union(*all_gather_objects(frozen, group))
        weights = full_weights(self.plait)
        if self.plait.rank:
            return None

        compute = self.plait.config.precision.compute
        # Names of tied parameters share a tensor, also in the result.
        cast: dict[int, torch.Tensor] = {}
        result = {}
        for name, value in weights.items():
            if exclude_frozen_parameters and name in frozen:
                continue
            if id(value) not in cast:
                cast[id(value)] = value
                if compute is not None and value.is_floating_point():
                    cast[id(value)] = value.to(dtype_of(compute))
            result[name] = cast[id(value)]
        return result

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True. Full weights are available at every stage."""
        return True

    def empty_partition_cache(self) -> None:
        """Free the gathered parameters."""
        free_gathered(self.module)


def _refuse_deepspeed_checkpoint(load_dir: str | Path, tag: str | None) -> None:
    """Raise CheckpointError for a checkpoint that DeepSpeed wrote.

    Without the error, a script would find no checkpoint and start from the beginning.
    """
    if "://" in str(load_dir):
        # The URL of a store is not a path.
        return
    folder = Path(load_dir)
    latest = folder / "latest"
    if tag is None and latest.is_file() and not (folder / "LATEST").is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if tag and any((folder / tag).glob("*_model_states.pt")):
        raise CheckpointError(
            f"{folder / tag}: was written by DeepSpeed; convert it with `plait import"
            f" {folder / tag} --out {folder}-plait`, and load {folder}-plait"
        )
