"""DeepSpeed's checkpoints of ZeRO 1 to 3, of any number of data-parallel ranks: float32 weights and
Adam's moments.

ZeRO 1 and 2 join the parameters of a group to one vector, of which every rank has an equal part. At
ZeRO 3 every rank has its part of every parameter, one after the other, in sub-groups.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import torch

from plait import exact
from plait.checkpoint.foreign.content import Foreign, Later, of_parts
from plait.checkpoint.foreign.unpickle import Inert, read_torch
from plait.errors import CheckpointError

_OWN = (
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
"""What DeepSpeed keeps there itself; everything else is the client's."""
_KEYS = ("exp_avg", "exp_avg_sq")


def is_deepspeed(folder: Path) -> bool:
    """Whether it is a folder of one of its checkpoints, or of several."""
    return any(folder.glob("*_optim_states.pt")) or (folder / "latest").is_file()


def read(folder: Path) -> Foreign:
    """Raises CheckpointError for what is incomplete, and for layouts with more than data
    parallelism.
    """
    if not any(folder.glob("*_optim_states.pt")) and (folder / "latest").is_file():
        named = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
        if named in ("", ".", "..") or "/" in named:
            raise CheckpointError(f"{folder / 'latest'} names {named!r}, which is no folder there")
        folder = folder / named
    files = {_rank(path): path for path in folder.glob("*zero_pp_rank_*_mp_rank_*_optim_states.pt")}
    if sorted(files) != list(range(len(files))) or not files:
        raise CheckpointError(
            f"{folder} has the optimizer states of the ranks {sorted(files)}: ZeRO 1 to 3 without"
            " gaps is read"
        )
    ranks = [read_torch(files[rank])["optimizer_state_dict"] for rank in range(len(files))]
    stage = ranks[0]["zero_stage"]
    stage = int(stage.args[0] if isinstance(stage, Inert) else stage)
    count = ranks[0]["partition_count"]
    if max(count if isinstance(count, list | tuple) else [count]) != len(ranks):
        raise CheckpointError(
            f"{folder} was written by {count} ranks, and has the files of {len(ranks)}"
        )
    models = [read_torch(path) for path in _models(folder, stage, len(ranks))]
    if (
        models[0].get("mp_world_size", 1) != 1
        or list(folder.glob("*mp_rank_01_*"))
        or list(folder.glob("layer_*"))
    ):
        raise CheckpointError(
            f"{folder} was written with tensor or pipeline parallelism, which is not read; convert"
            " it to dp alone first"
        )
    found = Foreign(
        f"DeepSpeed {models[0].get('ds_version', '')}, ZeRO {stage}, {len(ranks)} ranks".replace(
            " ,", ","
        )
    )
    shapes: list[dict[str, tuple[int, ...]]] = [
        {name: tuple(size) for name, size in group.items()} for group in models[0]["param_shapes"]
    ]
    if stage == 3:
        _read_third(found, ranks, shapes, models)
    else:
        _read_flat(found, ranks, shapes)
    for name, tensor in models[0]["module"].items():
        if (
            isinstance(tensor, torch.Tensor)
            and f"model.{name}" not in found.tensors
            and (stage < 3 or name in models[0]["buffer_names"])
        ):
            found.tensors[f"model.{name}"] = Later.of(tensor)
    for alias, name in (models[0].get("shared_params") or {}).items():
        if f"model.{name}" in found.tensors:
            found.tensors[f"model.{alias}"] = found.tensors[f"model.{name}"]
    _facts(found, models[0], ranks[0], shapes, stage)
    return found


def _read_flat(found: Foreign, ranks: list[Any], shapes: list[dict[str, tuple[int, ...]]]) -> None:
    states = [rank["base_optimizer_state"]["state"] for rank in ranks]
    for index, group in enumerate(shapes):
        paddings = (ranks[0].get("param_alignment_paddings") or [[0] * len(one) for one in shapes])[
            index
        ]
        vectors = {"": [rank["single_partition_of_fp32_groups"][index] for rank in ranks]}
        vectors |= {
            key: [state[index][key] for state in states]
            for key in _KEYS
            if all(key in state.get(index, {}) for state in states)
        }
        start = 0
        for (name, shape), padding in zip(group.items(), paddings, strict=True):
            for key, parts in vectors.items():
                _add(found, name, key, shape, parts, start)
            _step(found, name, states[0].get(index, {}))
            start += prod(shape) + int(padding)


def _read_third(
    found: Foreign, ranks: list[Any], shapes: list[dict[str, tuple[int, ...]]], models: list[Any]
) -> None:
    groups = [rank["fp32_flat_groups"] for rank in ranks]
    states = [rank["optimizer_state_dict"]["state"] for rank in ranks]
    vectors = {"": groups}
    vectors |= {
        key: [[state[index][key] for index in range(len(groups[0]))] for state in states]
        for key in _KEYS
        if all(key in state.get(index, {}) for state in states for index in range(len(groups[0])))
    }
    start = 0
    for name, shape in {name: shape for group in shapes for name, shape in group.items()}.items():
        part = -(-prod(shape) // len(ranks))
        for key, parts in vectors.items():

            def make(
                parts: Any = parts, start: int = start, part: int = part, size: int = prod(shape)
            ) -> torch.Tensor:
                return torch.cat([of_parts(own, start, part) for own in parts])[:size]

            found.tensors[_name(name, key)] = Later(shape, torch.float32, make)
        _step(found, name, states[0].get(0, {}))
        start += part
    for name, size in (models[0].get("frozen_param_shapes") or {}).items():
        fragments = [model["frozen_param_fragments"][name] for model in models]
        _add(found, name, "", tuple(size), fragments, 0, fragments[0].dtype)


def _add(
    found: Foreign,
    name: str,
    key: str,
    shape: tuple[int, ...],
    parts: list[torch.Tensor],
    start: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    found.tensors[_name(name, key)] = Later(
        shape, dtype, lambda: of_parts(parts, start, prod(shape))
    )


def _name(name: str, key: str) -> str:
    return f"optimizer.state.{name}.{key}" if key else f"model.{name}"


def _step(found: Foreign, name: str, state: Any) -> None:
    if "step" in state:
        step = torch.as_tensor(float(state["step"]))
        found.tensors[_name(name, "step")] = Later.of(step)


def _facts(
    found: Foreign, model: Any, rank: Any, shapes: list[dict[str, tuple[int, ...]]], stage: int
) -> None:
    found.steps, found.skipped = (
        int(model.get("global_steps", 0)),
        int(model.get("skipped_steps", 0)),
    )
    groups = (rank["optimizer_state_dict"] if stage == 3 else rank["base_optimizer_state"]).get(
        "param_groups", []
    )
    plain = [
        {
            key: value
            for key, value in group.items()
            if isinstance(value, int | float | bool | tuple | None)
        }
        for group in groups
    ]
    found.groups = [
        {**values, "params": list(names)} for values, names in zip(plain, shapes, strict=False)
    ]
    if not any(name.endswith(".exp_avg") for name in found.tensors):
        found.left_out.append("states of an optimizer that is no Adam")
    for key in sorted(set(model) - set(_OWN)):
        try:
            exact.encode(model[key], key)
            found.client_state[key] = model[key]
        except CheckpointError:
            found.left_out.append(f"client_state.{key}, which is no plain data")
    for key, what in (
        ("lr_scheduler", "the learning rate schedule"),
        ("data_sampler", "the data sampler"),
        ("random_ltd", "random LTD"),
    ):
        if model.get(key):
            found.left_out.append(
                f"{what} (step {found.steps}: give it to the new run's configuration)"
            )
    if rank.get("dynamic_loss_scale"):
        found.left_out.append("the dynamic loss scale, which begins anew")
    found.left_out.append("generators, which DeepSpeed does not save")


def _models(folder: Path, stage: int, ranks: int) -> list[Path]:
    if stage < 3:
        return [folder / "mp_rank_00_model_states.pt"]
    found = {
        _rank(path): path for path in folder.glob("*zero_pp_rank_*_mp_rank_00_model_states.pt")
    }
    if sorted(found) != list(range(ranks)):
        raise CheckpointError(
            f"{folder} has the model states of the ranks {sorted(found)}, and {ranks} ranks"
            " wrote it"
        )
    return [found[rank] for rank in range(ranks)]


def _rank(path: Path) -> int:
    match = re.search(r"zero_pp_rank_(\d+)_", path.name)
    return int(match[1]) if match is not None else -1
