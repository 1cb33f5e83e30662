"""DeepSpeed checkpoints of ZeRO 1 to 3 with data parallelism: float32 weights and Adam moments.

ZeRO 1 and 2 flatten the parameters of a group to one vector, of which every rank has an equal part.
At ZeRO 3 every rank stores its parts of all parameters one after the other, in sub-groups.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import torch

from plait import exact
from plait.checkpoint.foreign.content import ForeignCheckpoint, LazyTensor, slice_of_parts
from plait.checkpoint.foreign.unpickle import Inert, read_torch
from plait.errors import CheckpointError

_LIBRARY_KEYS = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
    "loss_scaler",
    "zero_stage",
)
"""Keys that DeepSpeed itself writes. All others are the client's state."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_deepspeed(folder: Path) -> bool:
    """Return True if a folder is a DeepSpeed checkpoint, or contains DeepSpeed checkpoints."""
    return any(folder.glob("*_optim_states.pt")) or (folder / "latest").is_file()


def read(folder: Path) -> ForeignCheckpoint:
    """Read a checkpoint, or the newest one in a folder of checkpoints.

    Raises:
        CheckpointError: The checkpoint is incomplete, or was written with tensor or pipeline
            parallelism.
    """
    if not any(folder.glob("*_optim_states.pt")) and (folder / "latest").is_file():
        folder = folder / _latest_name(folder)
    files = {_rank(path): path for path in folder.glob("*zero_pp_rank_*_mp_rank_*_optim_states.pt")}
    if sorted(files) != list(range(len(files))) or not files:
        raise CheckpointError(
            f"{folder} has the optimizer states of the ranks {sorted(files)}: those of all ranks"
            " are needed, and only ZeRO 1 to 3 with data parallelism is supported; copy the files"
            " of all ranks to it"
        )
    ranks = [read_torch(files[rank])["optimizer_state_dict"] for rank in range(len(files))]
    stage = ranks[0]["zero_stage"]
    if isinstance(stage, Inert):
        stage = stage.args[0]  # a member of ZeroStageEnum
    stage = int(stage)
    count = ranks[0]["partition_count"]
    counts = count if isinstance(count, list | tuple) else [count]  # one per parameter group
    if max(counts) != len(ranks):
        raise CheckpointError(
            f"{folder} was written by {count} ranks, but has only the files of {len(ranks)};"
            " copy the files of all ranks to it"
        )
    models = [read_torch(path) for path in _model_files(folder, stage, len(ranks))]
    model = models[0]
    if (
        model.get("mp_world_size", 1) != 1
        or list(folder.glob("*mp_rank_01_*"))
        or list(folder.glob("layer_*"))
    ):
        raise CheckpointError(
            f"{folder} was written with tensor or pipeline parallelism, which is not supported;"
            " first convert it to data parallelism only"
        )

    kind = f"DeepSpeed {model.get('ds_version', '')}, ZeRO {stage}, {len(ranks)} ranks"
    checkpoint = ForeignCheckpoint(kind.replace(" ,", ","))
    shapes: list[dict[str, tuple[int, ...]]] = [
        {name: tuple(size) for name, size in group.items()} for group in model["param_shapes"]
    ]
    if stage == 3:
        _read_stage_3(checkpoint, ranks, shapes, models)
    else:
        _read_flat_groups(checkpoint, ranks, shapes)

    for name, tensor in model["module"].items():
        if not isinstance(tensor, torch.Tensor) or f"model.{name}" in checkpoint.tensors:
            continue
        # At ZeRO 3 the module's parameters are empty; only its buffers are full.
        if stage < 3 or name in model["buffer_names"]:
            checkpoint.tensors[f"model.{name}"] = LazyTensor.from_tensor(tensor)
    for alias, name in (model.get("shared_params") or {}).items():
        if f"model.{name}" in checkpoint.tensors:
            checkpoint.tensors[f"model.{alias}"] = checkpoint.tensors[f"model.{name}"]
    _read_settings(checkpoint, model, ranks[0], shapes, stage)
    return checkpoint


def _latest_name(folder: Path) -> str:
    name = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
    if name in ("", ".", "..") or "/" in name:
        raise CheckpointError(
            f"{folder / 'latest'} names {name!r}, which is not a folder there; pass the folder of"
            " one checkpoint"
        )
    return name


def _read_flat_groups(
    checkpoint: ForeignCheckpoint, ranks: list[Any], shapes: list[dict[str, tuple[int, ...]]]
) -> None:
    """Add the tensors of a ZeRO 1 or 2 checkpoint to `checkpoint`."""
    states = [rank["base_optimizer_state"]["state"] for rank in ranks]
    all_paddings = ranks[0].get("param_alignment_paddings")
    for index, group in enumerate(shapes):
        # Parts of the flat vector on all ranks, by moment; "" is the weights.
        vectors = {"": [rank["single_partition_of_fp32_groups"][index] for rank in ranks]}
        for key in _MOMENTS:
            if all(key in state.get(index, {}) for state in states):
                vectors[key] = [state[index][key] for state in states]

        paddings = all_paddings[index] if all_paddings else [0] * len(group)
        start = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            for key, parts in vectors.items():
                _add_slice(checkpoint, _tensor_name(name, key), shape, parts, start)
            _add_step(checkpoint, name, states[0].get(index, {}))
            start += prod(shape) + int(padding)


def _read_stage_3(
    checkpoint: ForeignCheckpoint,
    ranks: list[Any],
    shapes: list[dict[str, tuple[int, ...]]],
    models: list[Any],
) -> None:
    """Add the tensors of a ZeRO 3 checkpoint to `checkpoint`."""
    groups = [rank["fp32_flat_groups"] for rank in ranks]
    states = [rank["optimizer_state_dict"]["state"] for rank in ranks]
    sub_groups = range(len(groups[0]))
    # Sub-groups of each rank, by moment; "" is the weights.
    vectors = {"": groups}
    for key in _MOMENTS:
        if all(key in state.get(index, {}) for state in states for index in sub_groups):
            vectors[key] = [[state[index][key] for index in sub_groups] for state in states]

    start = 0
    for name, shape in {name: shape for group in shapes for name, shape in group.items()}.items():
        length = -(-prod(shape) // len(ranks))
        for key, parts_of_ranks in vectors.items():
            # Defaults bind the values of this iteration.
            def assemble(
                parts_of_ranks: Any = parts_of_ranks,
                start: int = start,
                length: int = length,
                size: int = prod(shape),
            ) -> torch.Tensor:
                shards = [slice_of_parts(parts, start, length) for parts in parts_of_ranks]
                return torch.cat(shards)[:size]

            tensor = LazyTensor(shape, torch.float32, assemble)
            checkpoint.tensors[_tensor_name(name, key)] = tensor
        _add_step(checkpoint, name, states[0].get(0, {}))
        start += length
    for name, size in (models[0].get("frozen_param_shapes") or {}).items():
        fragments = [model["frozen_param_fragments"][name] for model in models]
        _add_slice(
            checkpoint, _tensor_name(name, ""), tuple(size), fragments, 0, fragments[0].dtype
        )


def _add_slice(
    checkpoint: ForeignCheckpoint,
    name: str,
    shape: tuple[int, ...],
    parts: list[torch.Tensor],
    start: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add a tensor that begins at element `start` of the concatenated parts."""

    def assemble() -> torch.Tensor:
        return slice_of_parts(parts, start, prod(shape))

    checkpoint.tensors[name] = LazyTensor(shape, dtype, assemble)


def _tensor_name(name: str, key: str) -> str:
    return f"optimizer.state.{name}.{key}" if key else f"model.{name}"


def _add_step(checkpoint: ForeignCheckpoint, name: str, state: Any) -> None:
    if "step" in state:
        step = torch.as_tensor(float(state["step"]))
        checkpoint.tensors[_tensor_name(name, "step")] = LazyTensor.from_tensor(step)


def _read_settings(
    checkpoint: ForeignCheckpoint,
    model: Any,
    rank: Any,
    shapes: list[dict[str, tuple[int, ...]]],
    stage: int,
) -> None:
    """Add counters, parameter groups and the client's state, and list what is left out."""
    checkpoint.steps = int(model.get("global_steps", 0))
    checkpoint.skipped = int(model.get("skipped_steps", 0))
    optimizer = rank["optimizer_state_dict"] if stage == 3 else rank["base_optimizer_state"]
    groups = optimizer.get("param_groups", [])
    if groups and len(groups) != len(shapes):
        raise CheckpointError(
            f"the optimizer state has {len(groups)} parameter groups and param_shapes has"
            f" {len(shapes)}; save the checkpoint again with one version of DeepSpeed"
        )
    for group, names in zip(groups, shapes, strict=False):
        values = {
            key: value
            for key, value in group.items()
            if isinstance(value, int | float | bool | tuple | None)
        }
        checkpoint.groups.append({**values, "params": list(names)})
    if not any(name.endswith(".exp_avg") for name in checkpoint.tensors):
        checkpoint.left_out.append("states of an optimizer other than Adam")

    for key in sorted(set(model) - set(_LIBRARY_KEYS)):
        try:
            exact.encode(model[key], key)
            checkpoint.client_state[key] = model[key]
        except CheckpointError:
            checkpoint.left_out.append(f"client_state.{key}, which is not plain data")
    for key, description in (
        ("lr_scheduler", "the learning rate schedule"),
        ("data_sampler", "the data sampler"),
        ("random_ltd", "random LTD"),
    ):
        if model.get(key):
            checkpoint.left_out.append(
                f"{description} (step {checkpoint.steps}: set it in the new run's configuration)"
            )
    if rank.get("dynamic_loss_scale"):
        checkpoint.left_out.append("the dynamic loss scale, which is reset")
    checkpoint.left_out.append("generators, which DeepSpeed does not save")


def _model_files(folder: Path, stage: int, ranks: int) -> list[Path]:
    if stage < 3:
        return [folder / "mp_rank_00_model_states.pt"]
    paths = folder.glob("*zero_pp_rank_*_mp_rank_00_model_states.pt")
    files = {_rank(path): path for path in paths}
    if sorted(files) != list(range(ranks)):
        raise CheckpointError(
            f"{folder} has the model states of the ranks {sorted(files)}, but {ranks} ranks"
            " wrote it; copy the files of all ranks to it"
        )
    return [files[rank] for rank in range(ranks)]


def _rank(path: Path) -> int:
    match = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(match[1]) if match is not None else -1
