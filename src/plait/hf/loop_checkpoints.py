"""`save_state` and `load_state` of an Accelerate loop.

A folder has the engine's checkpoint, the states of the schedulers, and the registered objects.
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

# Keys of the client state of the engine's checkpoint.
_ORDERS = "orders"
_EPOCHS = "epochs"
_STEP = "accumulation step"


class LoopCheckpoints:
    """Methods of `plait.hf.Accelerator` that save and load."""

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
        """Write the state of the training into a folder. Collective.

        `output_dir/plait` has the model, optimizer, loss scale, random generators and the order of
        the data. It loads on any layout. Next to it are the schedulers and the objects that were
        registered with `register_for_checkpointing`.

        Returns:
            The folder.
        """
        engine = self._require_engine("save_state")
        if output_dir is None:
            raise InputError("accelerator.save_state needs a folder")
        if kwargs:
            raise InputError(
                f"accelerator.save_state({', '.join(kwargs)}=): Plait writes its own files; leave"
                " it out"
            )
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        reading = bool(self.gradient_state.in_dataloader)
        client = {
            _ORDERS: [order.state(reading=reading) for order in self._orders],
            _EPOCHS: [loader.iteration for loader in self._dataloaders],
            _STEP: self.step,
        }
        engine.save_checkpoint(output_dir, tag=TAG, client_state=client)
        if self.is_main_process:
            states = [scheduler.state_dict() for scheduler in self._schedulers]
            torch.save(states, Path(output_dir) / "schedulers.pt")
            for index, entry in enumerate(self._custom_objects):
                save_custom_state(entry, output_dir, index)
        self.wait_for_everyone()  # type: ignore[attr-defined]
        return output_dir

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Continue from a folder of `save_state`, on any layout. Collective.

        If it was saved inside of an epoch, the first pass over a loader reads that epoch. Skip the
        batches that were read with `accelerator.skip_first_batches`.

        Raises:
            CheckpointError: The folder was not written by `save_state`, or with other objects.
        """
        engine = self._require_engine("load_state")
        if input_dir is None or load_kwargs or kwargs:
            raise InputError(
                "accelerator.load_state takes only the folder of a save_state; pass no other"
                " arguments"
            )
        loaded = None
        if (Path(input_dir) / TAG).is_dir():
            loaded = engine.load_checkpoint(input_dir, tag=TAG)
        if loaded is None:
            raise CheckpointError(
                f"{input_dir} has no folder `{TAG}`, which accelerator.save_state of"
                " plait.hf.Accelerator writes"
            )
        _, client = loaded
        states = torch.load(Path(input_dir) / "schedulers.pt", weights_only=True)
        for name, saved, prepared in (
            ("loaders", client[_EPOCHS], self._dataloaders),
            ("shuffled loaders", client[_ORDERS], self._orders),
            ("schedules", states, self._schedulers),
        ):
            if len(saved) != len(prepared):
                raise CheckpointError(
                    f"{input_dir} was written with {len(saved)} {name}, and {len(prepared)} were"
                    " given to accelerator.prepare; prepare the same before load_state"
                )

        for loader, epoch in zip(self._dataloaders, client[_EPOCHS], strict=True):
            loader.iteration = epoch
        for order, state in zip(self._orders, client[_ORDERS], strict=True):
            order.restore(state)
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
        """Write the model's weights in full. The first process writes them. Collective."""
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

    def _require_engine(self, call: str) -> Engine:
        """Return the engine, or raise InputError if there is none yet."""
        if self.engine is None:
            raise InputError(
                f"accelerator.{call}: no model is trained yet; call accelerator.prepare(model,"
                " optimizer, ...) first"
            )
        return self.engine


class DrawnOrder:
    """Sampler that records the state of its generator at the start of each epoch.

    Args:
        sampler: A sampler that draws the order of the samples from its own generator.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self._epoch_start = sampler.generator.get_state()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        self._epoch_start = self.sampler.generator.get_state()
        yield from self.sampler

    def state(self, *, reading: bool) -> torch.Tensor:
        """Return the generator state from which a resumed run draws the order of its first epoch.

        Args:
            reading: Whether an epoch is being read. Then the result is the state at the start of
                that epoch. Otherwise it is the state at the start of the next one.
        """
        return self._epoch_start if reading else self.sampler.generator.get_state()

    def restore(self, state: torch.Tensor) -> None:
        """Set the generator to a state, from which it draws the order of the next epoch."""
        self.sampler.generator.set_state(state)
