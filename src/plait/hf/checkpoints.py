"""Checkpoint folders of a Trainer or an Accelerate loop, which contain the engine's checkpoint.

A folder `checkpoint-N` has the files of the Trainer. Its subfolder `plait` has the engine's
checkpoint, from which a run resumes. A folder that `save_state` writes has the engine's checkpoint,
with the states of the schedulers, and one file per registered object.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from plait import exact
from plait.checkpoint.folder import find_checkpoint, list_complete
from plait.cluster.topology import place
from plait.comm.failures import run_on_all_ranks
from plait.config.resolving.resolve import Resolved
from plait.engine.engine import Engine
from plait.engine.weights import full_weights, load_weights_of, unsplit_model
from plait.errors import CheckpointError, InputError, Problem, first_line, warn
from plait.hf.accelerator import FULL_WEIGHTS
from plait.model.adapters import adapter_names, with_full_prompts
from plait.sharded.shards_as_weights import refuse_given_shards

TAG = "plait"
"""Folder of the engine's checkpoint in `checkpoint-N`."""

# Keys of the client state of the engine's checkpoint.
SAMPLES = "samples of a step"
_STEPS = "steps of an epoch"
_EPOCH = "epoch"
_READ = "samples read of the epoch"


class CheckpointMixin:
    """Methods of `TrainerMixin` that save and load weights and training states.

    Attributes:
        engine: Engine with the model on its layout. None before the first `train`, `evaluate` or
            `predict`.
    """

    engine: Engine | None = None
    model: Any
    args: Any
    accelerator: Any
    lr_scheduler: Any
    state: Any
    _epoch: int
    _position: int
    """Number of micro-batches of the epoch that a rank has read."""
    _steps_of_epoch: int | None
    """Number of optimizer steps per epoch, or None if the length of the data is not known."""

    def _samples_of_round(self) -> int:
        """Return the number of samples in one micro-batch of all data-parallel ranks."""
        return int(self.args.per_device_train_batch_size * self.accelerator.num_processes)

    def _init_training_state(
        self,
        max_steps: int,
        steps_of_epoch: int,
        epochs: int,
        resume_from_checkpoint: Any,
        *others: Any,
    ) -> Any:
        """Return the position of a resumed run.

        If the length of the data is not known, Transformers treats the whole run as one epoch. In
        that case Plait's checkpoint contains the number of samples that were read in the last
        epoch.

        Returns:
            The number of complete epochs, and the number of micro-batches that were read in the
            next epoch.
        """
        position = super()._init_training_state(  # type: ignore[misc]
            max_steps, steps_of_epoch, epochs, resume_from_checkpoint, *others
        )
        is_length_known = epochs != sys.maxsize
        if resume_from_checkpoint is None or is_length_known or self.args.ignore_data_skip:
            return position
        if not (Path(resume_from_checkpoint) / TAG).is_dir():
            return position
        saved = find_checkpoint(Path(resume_from_checkpoint), TAG)
        if saved is None:
            return position
        client = exact.decode(saved.manifest.metadata.get("client_state"), where="client_state")
        # A round of this layout that was read in part counts as read.
        return client[_EPOCH], math.ceil(client[_READ] / self._samples_of_round())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the full weights to a folder that `from_pretrained` can load. Collective."""
        if self.engine is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        model = self.model
        weights = full_weights(self.engine, model=model, adapters=adapter_names(model))
        if self.args.should_save:
            # A script may have assigned another model, such as one with merged adapters.
            if model is self.engine.model:
                # PEFT reads names from the modules, and a pipeline stage does not have all.
                self.model = unsplit_model(self.engine)
            try:
                with with_full_prompts(self.model, weights):
                    self._save(output_dir or self.args.output_dir, state_dict=weights)
            finally:
                self.model = model
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write weights as the Trainer does. Scripts call this with their own state dict.

        Raises:
            InputError: The weights are shards.
            CheckpointError: A file without a tensor was written. The file is removed.
        """
        refuse_given_shards(
            "trainer._save",
            state_dict,
            remedy=f"call trainer.save_model(folder), or {FULL_WEIGHTS}",
        )
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        refuse_empty_files(Path(output_dir or self.args.output_dir), adapter_names(self.model))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        read = self._position * self._samples_of_round()
        client = {
            SAMPLES: self.engine.train_batch_size(),
            _STEPS: self._steps_of_epoch,
            _EPOCH: self._epoch,
            _READ: read,
        }
        self.engine.save_checkpoint(output_dir, tag=TAG, client_state=client)
        # The Trainer steps its schedule itself, so the engine's checkpoint does not have it.
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / TAG).is_dir():
            return
        assert self.engine is not None
        loaded = self.engine.load_checkpoint(checkpoint, tag=TAG)
        client = loaded[1] if loaded is not None else {}
        saved_samples = client.get(SAMPLES)
        samples = self.engine.train_batch_size()
        if saved_samples not in (None, samples) and not self.args.ignore_data_skip:
            raise InputError(
                f"{checkpoint} was written with {saved_samples} samples per step, but this run has"
                f" {samples} (per_device_train_batch_size {self.args.per_device_train_batch_size} x"
                f" gradient_accumulation_steps {self.args.gradient_accumulation_steps} x dp"
                f" {self.engine.dp_size}), so the position in the epoch is not known; make the"
                " samples per step equal, or set ignore_data_skip=True"
            )
        # Transformers computes the epoch and the position in it from the number of steps. With
        # dataloader_drop_last, the layout and the size of micro-batches decide what is dropped.
        saved_steps = client.get(_STEPS)
        steps = self._steps_of_epoch
        is_comparable = saved_steps is not None and steps is not None
        if is_comparable and saved_steps != steps and not self.args.ignore_data_skip:
            raise InputError(
                f"{checkpoint} was written with {saved_steps} steps per epoch, but this run has"
                f" {steps} (train_dataset, dataloader_drop_last ="
                f" {self.args.dataloader_drop_last}, per_device_train_batch_size"
                f" {self.args.per_device_train_batch_size} x dp {self.engine.dp_size}), so the"
                " position in the epoch is not known; pass the same data, with dataloader_drop_last"
                " also the same per_device_train_batch_size x dp, or set ignore_data_skip=True"
            )
        schedule = Path(checkpoint) / "scheduler.pt"
        try:
            state = torch.load(schedule, weights_only=True)
        except Exception as error:  # torch raises errors of many classes
            raise CheckpointError(
                f"{schedule}, which has the position in the learning-rate schedule, does not exist"
                f" or cannot be read ({type(error).__name__}: {first_line(error)}); pass another"
                " checkpoint-N of the run"
            ) from error
        self.lr_scheduler.load_state_dict(state)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a folder that contains no checkpoint of the engine.

        The engine loads its own checkpoints later, when it has the model.

        Raises:
            CheckpointError: The Trainer's state file, which contains the step number, does not
                exist or cannot be read.
            InputError: The folder contains only weights, and the model is already sharded.
        """
        _require_state(Path(resume_from_checkpoint))
        if (Path(resume_from_checkpoint) / TAG).is_dir():
            return
        if self.engine is not None:
            raise InputError(
                f"{resume_from_checkpoint} has weights only (save_only_model=True, or another"
                " Trainer's), but this Trainer's model is sharded already; load the weights"
                " in a new Trainer"
            )
        if place().rank == 0:
            warn(
                f"{resume_from_checkpoint} has no optimizer state of Plait: its weights are loaded,"
                " and the optimizer starts without state"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        assert self.engine is not None
        best = Path(self.state.best_model_checkpoint)
        if not (best / TAG).is_dir():
            raise InputError(
                f"{best} has weights only (save_only_model=True), which a sharded model does not"
                " load; train with save_only_model=False"
            )
        load_weights_of(self.engine, best, tag=TAG)

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing, because the engine's checkpoint contains all ranks' generator states."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing, because the engine has restored the generator states from its checkpoint."""


def saving_problems(args: Any, resolved: Resolved) -> list[Problem]:
    """Return the problems that keep a Trainer from writing its checkpoints on a layout."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if resolved.parameter_offload.device != "nvme" or strategy == "no":
        return []
    rule = (
        "a checkpoint of the Trainer has the full weights, and"
        ' zero_optimization.offload_param.device = "nvme" keeps the parameters in files'
    )
    remedy = (
        'use "no", and after the training trainer.engine.save_checkpoint(folder), whose weights'
        ' plait.load_trained(model, folder) reads; or set offload_param.device to "none"'
    )
    return [Problem("TrainingArguments.save_strategy", strategy, rule, remedy)]


def refuse_empty_files(folder: Path, adapters: Sequence[str] = ()) -> None:
    """Remove weight files that contain no tensor, and raise CheckpointError if any was removed.

    Args:
        folder: Folder in which weights were written.
        adapters: Names of adapters. Each may have a subfolder with its weights.
    """
    folders = [folder, *(folder / name for name in adapters)]
    files = [path for parent in folders for path in parent.glob("*.safetensors")]
    empty = [path for path in files if not _has_tensors(path)]
    for path in empty:
        path.unlink()
    if empty:
        raise CheckpointError(
            f"{empty[0]} contained no tensors and was removed: the model that is saved has no"
            " weights that are stored in this format; save the model that was trained, or merge its"
            " adapters and assign the result to trainer.model"
        )


def _has_tensors(path: Path) -> bool:
    with safe_open(path, framework="pt") as file:
        return bool(file.keys())


def _require_state(folder: Path) -> None:
    state = folder / TRAINER_STATE_NAME
    try:
        TrainerState.load_from_json(str(state))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"resume_from_checkpoint = {str(folder)!r}: {TRAINER_STATE_NAME}, which has the step"
            f" that a run resumes from, does not exist or cannot be read ({type(error).__name__}:"
            f" {error}); pass another checkpoint-N of the run, or load the weights alone with"
            " from_pretrained"
        ) from error


# Keys of the client state of the engine's checkpoint.
_ORDERS = "orders"
_EPOCHS = "epochs"
_STEP = "accumulation step"
_SCHEDULES = "schedules"
_OBJECTS = "sha256 of the files of registered objects"


class LoopCheckpoints:
    """Methods of `plait.hf.Accelerator` that save and load weights and training states."""

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
        """Write the training state to a folder. Collective.

        `output_dir/plait` has the model, optimizer, schedulers, loss scale, random generators and
        the order of the data. It loads on any layout. `output_dir` also has the states of the
        objects that were registered with `register_for_checkpointing`.

        Returns:
            The folder.

        Raises:
            CheckpointError: A state cannot be saved.
        """
        engine = self._require_engine("save_state")
        if output_dir is None:
            raise InputError("accelerator.save_state got no folder; pass output_dir=")
        if kwargs:
            raise InputError(
                f"accelerator.save_state({', '.join(kwargs)}=): Plait writes its own files; leave"
                " it out"
            )

        def write_objects() -> list[str]:
            # The client state of the first rank is saved.
            if not self.is_main_process:
                return []
            return _write_objects(self._custom_objects, Path(output_dir))

        # Before the engine's checkpoint, which has their hashes.
        hashes, _ = run_on_all_ranks(
            write_objects, device=engine.device, activity=f"accelerator.save_state({output_dir!r})"
        )
        reading = bool(self.gradient_state.in_dataloader)
        client = {
            _ORDERS: [order.state(reading=reading) for order in self._orders],
            _EPOCHS: [loader.iteration for loader in self._dataloaders],
            _STEP: self.step,
            _SCHEDULES: [scheduler.state_dict() for scheduler in self._schedulers],
            _OBJECTS: hashes,
        }
        engine.save_checkpoint(output_dir, tag=TAG, client_state=client)
        if self.is_main_process:
            _remove_objects(Path(output_dir), keep=hashes)
        return output_dir

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Continue from a folder that `save_state` wrote, on any layout. Collective.

        If the state was saved inside an epoch, the first pass over a loader reads that epoch again
        from its start. `accelerator.skip_first_batches` skips the batches that were read before the
        save.

        Raises:
            CheckpointError: The folder was not written by `save_state`, or was written with
                different prepared or registered objects.
        """
        engine = self._require_engine("load_state")
        if input_dir is None or load_kwargs or kwargs:
            raise InputError(
                "accelerator.load_state takes only the folder of a save_state; pass no other"
                " arguments"
            )
        loaded = None
        # A save that was interrupted may leave only the checkpoint that it was to replace.
        if (Path(input_dir) / TAG).is_dir() or list_complete(Path(input_dir)):
            loaded = engine.load_checkpoint(input_dir, tag=TAG)
        if loaded is None:
            raise CheckpointError(
                f"{input_dir} has no folder `{TAG}`, which accelerator.save_state of"
                " plait.hf.Accelerator writes; pass a folder that it wrote"
            )
        _, client = loaded
        if not {_ORDERS, _EPOCHS, _STEP, _SCHEDULES, _OBJECTS} <= client.keys():
            raise CheckpointError(
                f"{input_dir} was not written by accelerator.save_state of this version of"
                " plait.hf.Accelerator; pass a folder that it wrote"
            )
        for name, saved, prepared, call in (
            ("loaders", client[_EPOCHS], self._dataloaders, "prepare"),
            ("shuffled loaders", client[_ORDERS], self._orders, "prepare"),
            ("schedules", client[_SCHEDULES], self._schedulers, "prepare"),
            (
                "objects",
                client[_OBJECTS],
                self._custom_objects,
                "register_for_checkpointing",
            ),
        ):
            if len(saved) != len(prepared):
                raise CheckpointError(
                    f"{input_dir} was written with {len(saved)} {name}, but {len(prepared)} were"
                    f" given to accelerator.{call}; pass the same objects before load_state"
                )

        def read_objects() -> list[Any]:
            hashes = enumerate(client[_OBJECTS])
            return [_read_object(Path(input_dir), index, sha256) for index, sha256 in hashes]

        states, _ = run_on_all_ranks(
            read_objects, device=engine.device, activity=f"accelerator.load_state({input_dir!r})"
        )
        for loader, epoch in zip(self._dataloaders, client[_EPOCHS], strict=True):
            loader.iteration = epoch
        for order, state in zip(self._orders, client[_ORDERS], strict=True):
            order.restore(state)
        for scheduler, state in zip(self._schedulers, client[_SCHEDULES], strict=True):
            scheduler.load_state_dict(state)
        self.step = client[_STEP]
        for entry, state in zip(self._custom_objects, states, strict=True):
            entry.load_state_dict(state)

    def save_model(
        self,
        model: Any,
        save_directory: str,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the model's full weights to a folder, in the first process. Collective."""
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
        """Return the engine, or raise InputError if it does not exist yet."""
        if self.engine is None:
            raise InputError(
                f"accelerator.{call}: no model is trained yet; call accelerator.prepare(model,"
                " optimizer, ...) first"
            )
        return self.engine


def _object_file(folder: Path, index: int, sha256: str) -> Path:
    """Return the file of the state of a registered object.

    Its name contains its hash, so a save does not replace the file that the checkpoint before it
    needs until the new checkpoint is complete.
    """
    return folder / f"custom_checkpoint_{index}-{sha256}.pkl"


def _write_objects(objects: Sequence[Any], folder: Path) -> list[str]:
    """Write the states of registered objects, and return the sha256 of each file.

    Raises:
        CheckpointError: `_read_object` could not load a state.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hashes = []
    for index, entry in enumerate(objects):
        partial = folder / f".custom_checkpoint_{index}.part"
        try:
            torch.save(entry.state_dict(), partial)
            classes = torch.serialization.get_unsafe_globals_in_checkpoint(partial)
            if classes:
                raise CheckpointError(
                    f"the state of the registered {type(entry).__name__} contains"
                    f" {', '.join(classes)}, whose code would run when the state is loaded; let"
                    " state_dict() return tensors, numbers, text, lists and dicts, or allow the"
                    " class with torch.serialization.add_safe_globals"
                )
            sha256 = _sha256_of_file(partial)
            partial.replace(_object_file(folder, index, sha256))
        finally:
            partial.unlink(missing_ok=True)
        hashes.append(sha256)
    return hashes


def _read_object(folder: Path, index: int, sha256: str) -> Any:
    """Return the state of a registered object.

    Raises:
        CheckpointError: The file is missing, or is not the one that was written.
    """
    path = _object_file(folder, index, sha256)
    if not path.is_file() or _sha256_of_file(path) != sha256:
        raise CheckpointError(
            f"{path}, the state of a registered object, is missing or damaged; load another folder"
        )
    # Never with code: whoever can change the file could also change the hash.
    return torch.load(path, map_location="cpu", weights_only=True)


def _remove_objects(folder: Path, *, keep: Sequence[str]) -> None:
    """Remove the states of registered objects that no complete checkpoint in `folder` needs.

    The newest save may still be written in the background. Its files are kept too.
    """
    needed = {_object_file(folder, index, sha256) for index, sha256 in enumerate(keep)}
    for checkpoint in list_complete(folder):
        if checkpoint.manifest.tag == TAG:
            state = checkpoint.manifest.metadata["client_state"]
            client = exact.decode(state, where="client_state")
            for index, sha256 in enumerate(client[_OBJECTS]):
                needed.add(_object_file(folder, index, sha256))
    for path in folder.glob("custom_checkpoint_*-*.pkl"):
        if path not in needed:
            path.unlink(missing_ok=True)


def _sha256_of_file(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
        """Set the state of the generator that draws the order of the next epoch."""
        self.sampler.generator.set_state(state)
