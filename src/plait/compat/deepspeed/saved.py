"""The part of the engine that saves and loads, and gives the model's weights in full."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait import exact
from plait.checkpoint.load import Reader
from plait.compat.deepspeed.parts import full
from plait.compat.deepspeed.refused import refuse_given
from plait.engine.engine import Engine
from plait.engine.weights import full_weights, load_weights_of
from plait.errors import CheckpointError, InputError, warn
from plait.parallel.data.data_parallel import free_gathered
from plait.units import dtype_of

_PREFIX = "module."
"""Of the names in a state of DeepSpeed's engine, whose model is its `module`."""


class SavedState:
    """Base of `DeepSpeedEngine`."""

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
        """Write a checkpoint of Plait's, which loads on any layout, as `save_dir/tag` (default
        `global_step10`). The tag and the client state are those of the first process. Collective.
        Returns True. Raises CheckpointError, and InputError for what cannot be honoured.
        """
        if not save_latest:
            raise InputError(
                "engine.save_checkpoint(save_latest=False): the newest checkpoint is the latest;"
                " save into another folder"
            )
        if exclude_frozen_parameters:
            raise InputError(
                "engine.save_checkpoint(exclude_frozen_parameters=True): a checkpoint holds all"
                " parameters; leave it out"
            )
        own = str(tag) if tag is not None else f"global_step{self.plait.global_steps}"
        name = self._of_first_process(own)
        if name != own:
            warn(
                f"engine.save_checkpoint(tag={own!r}): processes give different tags; the"
                f" checkpoint is named {name!r}, as the first says"
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
        """Go on from `load_dir/tag`, or from the latest. Returns its path and the client state;
        (None, None) where there is none, with a warning. `load_module_only` loads the weights
        alone; without optimizer and schedule the weights and the step count are loaded. Collective.
        Raises CheckpointError, also for a checkpoint that DeepSpeed wrote, and InputError for what
        cannot be honoured.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise InputError(
                "engine.load_checkpoint(load_module_strict=False, custom_load_fn=...): a checkpoint"
                " is of exactly this model; leave them out, or change names in what"
                " plait.load_trained reads"
            )
        if not load_module_only and load_optimizer_states != load_lr_scheduler_states:
            raise InputError(
                "engine.load_checkpoint(load_optimizer_states=..., load_lr_scheduler_states=...):"
                " optimizer and schedule are loaded together, or neither; give both the same value"
            )
        name = str(tag) if tag is not None else None
        _refuse_deepspeeds(load_dir, name)
        if load_module_only or not load_optimizer_states:
            reader = self._load_weights(load_dir, name)
            if reader is None:
                return self._nothing(load_dir)
            facts = reader.manifest.metadata
            if not load_module_only:
                self.plait.global_steps, self.plait.skipped_steps = (
                    facts["global_steps"],
                    facts["skipped_steps"],
                )
            return str(reader.path), exact.decode(facts["client_state"], where="client_state")
        self.is_reduced = False
        found = self.plait.load_checkpoint(str(load_dir), tag=name)
        return (str(found[0]), found[1]) if found is not None else self._nothing(load_dir)

    def _load_weights(self, load_dir: str | Path, tag: str | None) -> Reader | None:
        if self.plait.sharded.guard.backwards:
            self.plait.zero_grad()  # of other weights
        self.is_reduced = False
        return load_weights_of(self.plait, load_dir, tag=tag)

    def _nothing(self, load_dir: str | Path) -> tuple[None, None]:
        if self.plait.rank == 0:
            warn(f"engine.load_checkpoint: {load_dir} holds no checkpoint, so nothing was loaded")
        return None, None

    def _of_first_process(self, value: str) -> str:
        if self.plait.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.plait.device)
        return box[0]

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """A copy of the model's state, in full, on every rank. Collective: call it on every rank,
        also where one alone writes it. Raises InputError in a pipeline, whose ranks have a part of
        the model, and for `destination` and `keep_vars`.
        """
        refuse_given(
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
        free_gathered(self.module)
        frozen = {
            n
            for n, p in self.module.named_parameters(remove_duplicate=False)
            if not p.requires_grad
        }
        return {
            f"{prefix}{name}": full(value) if isinstance(value, torch.Tensor) else value
            for name, value in self.module.state_dict().items()
            if not (exclude_frozen_parameters and name in frozen)
        }

    def state_dict(self) -> dict[str, Any]:
        """`module_state_dict` with `module.` before every name, as the state of DeepSpeed's engine
        has it. Collective.
        """
        return self.module_state_dict(prefix=_PREFIX)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load full weights, with or without `module.` before every name, into this rank's parts.
        Every rank is given all of them. Optimizer states stay. Raises InputError between a backward
        and its step.
        """
        if self.plait.sharded.guard.backwards:
            raise InputError(
                "engine.load_state_dict() between a backward and its engine.step(): gradients are"
                " of other weights; load after"
            )
        free_gathered(self.module)
        prefixed = bool(state_dict) and all(name.startswith(_PREFIX) for name in state_dict)
        return self.module.load_state_dict(
            {
                name.removeprefix(_PREFIX) if prefixed else name: value
                for name, value in state_dict.items()
            },
            strict=strict,
        )

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """`load_state_dict` of the entry `module`."""
        self.load_state_dict(checkpoint["module"], strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the full weights, in the dtype of the computation, with torch.save. Collective; the
        first process needs memory for all of them. Returns True. Raises CheckpointError, on that
        process, where the file cannot be written.
        """
        weights = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if weights is not None:
            path = Path(save_dir) / save_filename
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(weights, path)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be written: {error.strerror or error}"
                ) from error
        return True

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The full weights, in the dtype of the computation, on the CPU of the first process; None
        in the others. Scripts call it, though DeepSpeed has it as its own. At every ZeRO stage.
        Collective.
        """
        frozen = {
            name
            for name, p in self.module.named_parameters(remove_duplicate=False)
            if not p.requires_grad
        }
        group = self.plait.mesh.group("pp")
        if group is not None and exclude_frozen_parameters:
            stages: list[Any] = [None] * group.size()
            dist.all_gather_object(stages, frozen, group=group)
            frozen = set().union(*stages)
        weights = full_weights(self.plait)
        if self.plait.rank:
            return None
        name = self.plait.config.precision.compute
        cast: dict[int, torch.Tensor] = {}  # tied names share a tensor
        for value in weights.values():
            cast.setdefault(
                id(value),
                (
                    value.to(dtype_of(name))
                    if name is not None and value.is_floating_point()
                    else value
                ),
            )
        return {
            key: cast[id(value)]
            for key, value in weights.items()
            if not (exclude_frozen_parameters and key in frozen)
        }

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always."""
        return True

    def empty_partition_cache(self) -> None:
        """Free parameters that are gathered."""
        free_gathered(self.module)


def _refuse_deepspeeds(load_dir: str | Path, tag: str | None) -> None:
    """Raise CheckpointError for a checkpoint that DeepSpeed wrote: a script that finds none begins
    anew.
    """
    if "://" in str(load_dir):
        return
    folder = Path(load_dir)
    latest = Path(load_dir) / "latest"
    if tag is None and latest.is_file() and not (folder / "LATEST").is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if tag and any((folder / tag).glob("*_model_states.pt")):
        raise CheckpointError(
            f"{folder / tag}: DeepSpeed wrote it; make a checkpoint of Plait's of it, plait import"
            f" {folder / tag} --out {folder}-plait, and load {folder}-plait"
        )
