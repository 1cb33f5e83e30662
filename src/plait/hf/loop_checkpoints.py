"""`save_state` and `load_state` of an Accelerate loop: the engine's checkpoint, the schedules and
the objects that were registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.checkpointing import load_custom_state, save_custom_state

from plait.engine.engine import Engine
from plait.errors import CheckpointError, InputError
from plait.hf.checkpoints import TAG

_ORDERS = "orders"
_EPOCHS = "epochs"
_STEP = "accumulation step"


class LoopCheckpoints:
    """The part of `plait.hf.Accelerator` that saves and loads."""

    engine: Engine | None
    is_main_process: bool
    step: int
    gradient_state: Any
    _schedulers: list[Any]
    _custom_objects: list[Any]
    _dataloaders: list[Any]
    _orders: list[DrawnOrder]

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> str:
        """Model, optimizer, loss scale, random numbers and order of the data into
        `output_dir/plait`, the schedules and what `register_for_checkpointing` was given beside it.
        Loads on any layout. Collective. Returns the folder.
        """
        engine = self._prepared("save_state")
        if output_dir is None:
            raise InputError("accelerator.save_state needs a folder")
        if kwargs:
            raise InputError(
                f"accelerator.save_state({', '.join(kwargs)}=): Plait writes its own files; leave"
                " it out"
            )
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        reading = bool(self.gradient_state.in_dataloader)
        orders = [order.state(reading=reading) for order in self._orders]
        epochs = [loader.iteration for loader in self._dataloaders]
        engine.save_checkpoint(
            output_dir, tag=TAG, client_state={_ORDERS: orders, _EPOCHS: epochs, _STEP: self.step}
        )
        if self.is_main_process:
            torch.save(
                [scheduler.state_dict() for scheduler in self._schedulers],
                Path(output_dir) / "schedulers.pt",
            )
            for index, entry in enumerate(self._custom_objects):
                save_custom_state(entry, output_dir, index)
        self.wait_for_everyone()  # type: ignore[attr-defined]
        return output_dir

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Go on from a folder of `save_state`, also of another layout. The first pass over a loader
        that was saved inside of an epoch reads that epoch: skip what was read with
        `accelerator.skip_first_batches`. Collective. Raises CheckpointError.
        """
        engine = self._prepared("load_state")
        if input_dir is None or load_kwargs or kwargs:
            raise InputError(
                "accelerator.load_state takes the folder of save_state, and no other argument"
            )
        loaded = (
            engine.load_checkpoint(input_dir, tag=TAG) if (Path(input_dir) / TAG).is_dir() else None
        )
        if loaded is None:
            raise CheckpointError(
                f"{input_dir} has no folder `{TAG}`, which accelerator.save_state of"
                " plait.hf.Accelerator writes"
            )
        client = loaded[1]
        states = torch.load(Path(input_dir) / "schedulers.pt", weights_only=True)
        for what, saved, here in (
            ("loaders", client[_EPOCHS], self._dataloaders),
            ("shuffled loaders", client[_ORDERS], self._orders),
            ("schedules", states, self._schedulers),
        ):
            if len(saved) != len(here):
                raise CheckpointError(
                    f"{input_dir} was written with {len(saved)} {what}, and {len(here)} were given"
                    " to accelerator.prepare; prepare the same before load_state"
                )
        for loader, epoch in zip(self._dataloaders, client[_EPOCHS], strict=True):
            loader.iteration = epoch
        for order, state in zip(self._orders, client[_ORDERS], strict=True):
            order.go_on(state)
        for scheduler, state in zip(self._schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        self.step = client[_STEP]
        for index, entry in enumerate(self._custom_objects):
            load_custom_state(entry, input_dir, index)

    def save_model(
        self,
        model: Any,
        save_directory: str,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """The model's weights in full into a folder, written by the first process. Collective."""
        weights = self.get_state_dict(model)  # type: ignore[attr-defined]
        if self.is_main_process:
            from huggingface_hub import save_torch_state_dict

            Path(save_directory).mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(
                weights,
                save_directory,
                max_shard_size=max_shard_size,
                safe_serialization=safe_serialization,
            )
        self.wait_for_everyone()  # type: ignore[attr-defined]

    def _prepared(self, call: str) -> Engine:
        """The engine. Raises InputError where there is none yet."""
        if self.engine is None:
            raise InputError(
                f"accelerator.{call}: no model is trained yet; call accelerator.prepare(model,"
                " optimizer, ...) first"
            )
        return self.engine


class DrawnOrder:
    """A sampler that draws the order of the samples from its own generator, and knows where an
    epoch's order began.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler, self._began = sampler, sampler.generator.get_state()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self._began = self.sampler.generator.get_state()
        yield from self.sampler

    def state(self, *, reading: bool) -> torch.Tensor:
        """Of the generator: where this epoch's order began if it is being read, else where the next
        one's does.
        """
        return self._began if reading else self.sampler.generator.get_state()

    def go_on(self, state: torch.Tensor) -> None:
        """The next epoch is the one of `state`."""
        self.sampler.generator.set_state(state)
