"""From the command line and files to what is planned. Looks at this machine where no GPU is
named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.cli.launching.count import processes_of
from plait.cli.planning.calibrations import live_devices
from plait.cluster import accelerator
from plait.cluster.machines import load
from plait.cluster.topology import default_processes, machine_name
from plait.config.dialects.examine import at_path, examine
from plait.config.dialects.foreign import refuse_foreign
from plait.config.reading.source import read
from plait.errors import ConfigError, InputError, Problem
from plait.planner import calibration_file, hardware
from plait.planner.auto import (
    PATHS,
    File,
    asks,
    fixed_by,
    model_of,
    precision_of,
    read_file,
    with_settings_of,
)
from plait.planner.built import why_refused
from plait.planner.calibrate import Calibration
from plait.planner.fixed import parse_fixed, written
from plait.planner.models import find_model, named, unknown_layers
from plait.planner.request import Request, formula_notes
from plait.planner.unpriced import unpriced
from plait.units import GIB

_TOKENS = 4 * 2**20
"""Tokens of a step where no batch is given: usual for models of more than a few billion parameters.
"""


@dataclass(frozen=True)
class Asked:
    """What a command line and a file ask to be planned."""

    request: Request
    base: dict[str, Any]
    """The file as it is written, with the options of the command line in it; empty without a file.
    """
    tree: dict[str, Any]
    """The same under the schema's names."""
    fixed: dict[str, int]
    """Fields of the layout that file and options fix."""
    notes: list[str]


def read_request(
    *,
    file: Path | None,
    model: str | None,
    world_size: int | None,
    nnodes: int | None,
    nproc_per_node: int | None,
    gpu: str | None,
    batch: int | None,
    seq: int | None,
    precision: str | None,
    fix: list[str] | None,
    cluster: Path | None = None,
    compiled: bool = False,
    memory_gib: float | None = None,
    network: float | None = None,
    everything: bool = False,
    as_it_is: bool = False,
) -> Asked:
    """What is planned: for the values that a file gives (an option wins over the file, and a note
    says so), the rest open.

    Raises ConfigError for a file that cannot be run, InputError for what is missing or cannot be.
    """
    devices = _devices(world_size, nnodes, nproc_per_node, gpu)
    fixed = parse_fixed(fix or ())
    options = {"batch": batch, "seq": seq}
    for name, value in options.items():
        if value is not None and not 1 <= value <= _MOST:
            rule = _LEAST[name] if value < 1 else f"no plan counts more than {_MOST:,}"
            raise ConfigError(
                Problem(f"--{name}", value, rule, "give 1 or more" if value < 1 else "give fewer")
            )
    if precision not in (None, "bf16", "fp16", "fp32"):
        raise InputError(
            f"--precision {precision}: not one that Plait trains in; use bf16, fp16 or fp32"
        )
    notes: list[str] = []
    found = _read_file(
        file,
        _overrides(
            batch=batch, seq=seq, precision=precision, compiled=compiled, model=model, fixed=fixed
        ),
        notes,
    )
    planned = None
    per_device = None
    sequence = seq
    if found is not None:
        config = found.config
        if isinstance(config.train_batch_size, int):
            batch = config.train_batch_size
        elif isinstance(config.train_micro_batch_size_per_gpu, int):
            accumulation = config.gradient_accumulation_steps
            per_device = config.train_micro_batch_size_per_gpu * (
                accumulation if isinstance(accumulation, int) else 1
            )
        if sequence is None and config.data is not None:
            sequence = config.data.sequence_length
        planned = model_of(config)
    sequence = sequence or 4096
    if model is not None:
        planned = find_model(model, sequence=sequence)
    if planned is None:
        raise InputError(
            "--model: nothing to plan for; name a public model (`plait plan models`), a"
            " config.json, or a training configuration"
        )
    if devices is None and gpu is None and cluster is None:
        devices = default_processes() if found is None else processes_of(found.config)
    machines = cluster_for(
        gpus=devices,
        gpu=gpu,
        per_node=nproc_per_node,
        file=cluster,
        memory_gib=memory_gib,
        network=network,
    )
    if precision is None and found is not None:
        precision = precision_of(found.config)
        if precision == "fp32":
            notes.append(
                f"fp32: {file} switches neither bf16 nor fp16 on; --precision bf16 plans and writes"
                " that"
            )
    if precision is None:
        precision = next(p for p in ("bf16", "fp16", "fp32") if p in machines.device.flops)
        precision = "fp32" if machines.device.name == "cpu" else precision
    if batch is None and per_device is not None:
        batch = per_device * machines.devices
        notes.append(
            f"batch {batch}: {per_device} samples a device, as {file} has it; set another with"
            " --batch"
        )
    if batch is None:
        batch = max(1, round(_TOKENS / sequence / machines.devices)) * machines.devices
        notes.append(f"batch {batch}: about 4 Mi tokens a step; set it with --batch")
    if machines.device.name == "cpu" and gpu is None:
        notes.append(
            "no GPU here: planned for this machine's processes; name others with --gpu and"
            " --world-size"
        )
    notes += [
        note
        for note in (unknown_layers(planned.architecture), _too_long(planned.section, sequence))
        if note
    ]
    # what has a name is built
    described = planned.section.get("config") if model is None or named(model) is None else None
    if described and (refusal := why_refused(described)):
        notes.append(f"`plait train` refuses this model: {refusal}")
    request = Request(planned, machines, batch, sequence, precision, compiled, everything)
    notes += formula_notes(request)
    if found is None:
        return Asked(request, {}, {}, fixed, notes)
    request = with_settings_of(found.config, request)
    layout = {} if as_it_is and own_layout(file, found.tree) else fixed_by(found)
    if layout:
        notes.append(
            f'{file} fixes {written(layout)}; leave a key out or write "auto" to have it chosen'
        )
    left_out = unpriced(found.config)
    if left_out:
        notes.append(
            f"no plan prices {', '.join(left_out)}: what they change is not in the times and bytes"
        )
    return Asked(request, dict(found.raw), dict(found.tree), layout | fixed, notes)


def _too_long(section: Mapping[str, Any], sequence: int) -> str | None:
    """What to tell of samples that are longer than the model's configuration allows."""
    config = section.get("config") or {}
    names = (
        name
        for name in ("max_position_embeddings", "n_positions")
        if isinstance(config.get(name), int)
    )
    name = next(names, None)
    if name is None or sequence <= config[name]:
        return None
    rule = f"{name} is {config[name]}, and `plait train` refuses samples of {sequence} tokens"
    return f"{rule}; raise it in the model's configuration, or lower --seq"


def own_layout(file: Path | None, base: Mapping[str, Any]) -> bool:
    """Whether a file says all of a layout, so that its own is run and not the search's."""
    return (
        file is not None
        and "parallel" in base
        and "train_micro_batch_size_per_gpu" in base
        and not asks(base)
    )


def _devices(
    world_size: int | None, nnodes: int | None, nproc_per_node: int | None, gpu: str | None
) -> int | None:
    """The number of all devices, from the counts that are given. Raises InputError for counts that
    contradict each other.
    """
    if nnodes is None:
        return world_size
    each = nproc_per_node
    if each is None and gpu is not None:
        each = int(hardware.device(gpu).devices_per_node)
    if each is None:
        raise InputError(
            f"--nnodes {nnodes}: of how many GPUs each? add --nproc-per-node, or --gpu for what is"
            " usual"
        )
    if world_size is not None and world_size != nnodes * each:
        raise InputError(
            f"--world-size {world_size}: {nnodes} machines of {each} GPUs are {nnodes * each};"
            " leave one of the options out"
        )
    return nnodes * each


_MOST = 10**9
"""Samples of a step or tokens of a sample."""
_LEAST = {"batch": "a step has at least one sample", "seq": "a sample has at least one token"}


def _overrides(
    *,
    batch: int | None,
    seq: int | None,
    precision: str | None,
    compiled: bool,
    model: str | None,
    fixed: Mapping[str, int],
) -> dict[str, Any]:
    """What options say of the keys of a file; None takes the key out."""
    found: dict[str, Any] = {} if batch is None else {"train_batch_size": batch}
    if seq is not None:
        found["data.sequence_length"] = seq
    if precision is not None:
        found |= {
            f"{name}.enabled": True if name == precision else None for name in ("fp16", "bf16")
        }
    if compiled:
        found["compile.enabled"] = True
    if model is not None:
        found["model"] = None
    return found | {PATHS[name]: None for name in fixed}


def _read_file(file: Path | None, options: Mapping[str, Any], notes: list[str]) -> File | None:
    """A training file with the options of the command line in it; a note for every value of the
    file that is overridden.
    """
    if file is None:
        return None
    document = read(file)
    refuse_foreign(document)
    before = examine(document)
    after = examine(
        document,
        [
            (tuple(path.split(".")), value)
            for path, value in options.items()
            if _says(before.tree, path, value)
        ],
    )
    for path in options:
        was = at_path(before.tree, path)
        now = at_path(after.tree, path)
        if was not in (None, "auto") and was != now:
            shown = "a section" if isinstance(was, dict) else was
            notes.append(
                f"{before.written.get(path, path)} = {shown} of {file} is overridden by the command"
                " line"
            )
    return read_file(after)


def _says(tree: Mapping[str, Any], path: str, value: Any) -> bool:
    """Whether an option changes what a file says; a section that stays out is not made for it."""
    return value is not None or at_path(tree, path) is not None


def cluster_for(
    *,
    gpus: int | None,
    gpu: str | None = None,
    per_node: int | None = None,
    file: Path | None = None,
    memory_gib: float | None = None,
    network: float | None = None,
) -> hardware.Cluster:
    """The devices that are planned for: those that are named, else this machine's. Raises
    InputError for what is missing or unknown.
    """
    for name, value in (("--memory-gib", memory_gib), ("--network", network)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(
                f"{name} {value:g}: a device has some; give a number greater than 0, or leave"
                " it out"
            )
    changes: dict[str, float | None] = {
        "memory_bytes": memory_gib * GIB if memory_gib else None,
        "nic_bandwidth": network * 1e9 if network else None,
    }
    if file is not None:
        for name, count in (("--world-size", gpus), ("--nproc-per-node", per_node)):
            if count is not None:
                raise InputError(
                    f"{name} {count}: --cluster {file} sets their number; leave one of the two out"
                )
        topology = load(file)
        if gpu is None and topology.device_type == accelerator.NAME:
            raise InputError(
                f"{file}: a cluster file does not name the GPU model; add --gpu, for example --gpu"
                " h100"
            )
        return hardware.cluster_of(topology, gpu or "cpu", **changes)
    if gpu is not None:
        if gpus is None:
            raise InputError(f"--gpu {gpu}: how many? add --world-size, for example --world-size 8")
        return hardware.cluster(gpu, gpus, devices_per_node=per_node, **changes)
    topology, name = live_devices()
    if gpus is None:
        return hardware.cluster_of(topology, name, **changes)
    here = topology.nodes[0].devices
    memory = topology.memory_bytes
    each = per_node or (gpus if name == "cpu" else min(gpus, here))
    if name == "cpu" and memory is not None:
        memory = memory * here // each  # the processes of a machine share it
    changes["memory_bytes"] = changes["memory_bytes"] or memory
    return hardware.cluster(name, gpus, devices_per_node=each, **changes)


def read_calibration(path: Path | None, request: Request) -> Calibration | None:
    """Return the constants of a file of `plait calibrate`; None without a path. Raises InputError
    for a file of another device.
    """
    if path is None:
        return None
    gpu = str(request.cluster.device.name)
    together = min(request.cluster.devices, int(request.cluster.device.devices_per_node))
    machine = machine_name(together) if gpu == "cpu" else ""
    calibration, origin = calibration_file.load(path)
    calibration_file.refuse_other(path, origin, gpu=gpu, machine=machine)
    return calibration
