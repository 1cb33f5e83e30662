"""Request to the planner, built from the options of a command and the files that they name.

If no GPU is named, the plan is for the devices of this machine.

`plait train` plans a file whose layout contains "auto" (`planned_file`). The planned file is
written next to the run's folder. While the training file and the number of devices stay the same,
later starts use it again, so that a resumed run keeps its layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.cluster import accelerator
from plait.cluster.machines import Topology
from plait.cluster.topology import default_processes, device_count, discover, machine_name
from plait.config.dialects.examine import examine, value_at
from plait.config.resolving.resolve import examine_source
from plait.config.resolving.resolved_parts import smallest_world
from plait.config.schema.config import Config
from plait.errors import ConfigError, InputError, Problem
from plait.files import user_path
from plait.planner import calibrate, hardware
from plait.planner.built import why_refused
from plait.planner.calibrate import Calibration
from plait.planner.configuration import (
    PATHS,
    File,
    auto_paths,
    complete,
    fixed_by,
    model_of,
    paths_to_search,
    precision_of,
    read_file,
    unmodelled,
    with_settings_of,
)
from plait.planner.explain import describe
from plait.planner.models import find_model, named, unknown_layers
from plait.planner.output import write
from plait.planner.request import Request, formula_notes
from plait.planner.techniques import format_fixed, parse_fixed
from plait.sizes import GIB

_DEFAULT_TOKENS = 4 * 2**20
"""Tokens of a step without --batch, usual for models of more than a few billion parameters."""
_MAX_SIZE = 10**9
"""Largest number of samples in a step, and of tokens in a sample."""
_MIN_RULES = {"batch": "a step has at least one sample", "seq": "a sample has at least one token"}


@dataclass(frozen=True)
class PlanQuery:
    """Request to the planner, the configuration behind the request, and notes for the user."""

    request: Request
    base: dict[str, Any]
    """The file as written, with the options of the command line. Empty without a file."""
    tree: dict[str, Any]
    """`base` with the names of the schema."""
    fixed: dict[str, int]
    """Fields of the layout that the file and the options fix."""
    notes: list[str]


def process_count(config: Config) -> int:
    """Return the number of processes that a configuration starts on this machine by default.

    It is the number in the file, else one per GPU. Without GPUs it is the number of ranks that the
    layout requires, or, if the layout requires only one, `topology.default_processes`.
    """
    processes = config.run.processes if config.run is not None else "auto"
    if processes != "auto":
        return processes
    required = smallest_world(config.parallel)
    if required > 1 and not device_count():
        return required
    return default_processes()


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
    compiled: bool = False,
    memory_gib: float | None = None,
    network: float | None = None,
    keeps_layout: bool = False,
) -> PlanQuery:
    """Build the request to the planner from a training file and the options of a command.

    Args:
        file: A training configuration. The plan uses its values. Options override them, with a note
            for the user.
        keeps_layout: Whether the caller runs a complete layout of the file as it is, without a
            search. The layout is then not added to the fixed fields.

    The other arguments are the options of the command line; None means an unused option.

    Raises:
        ConfigError: The file cannot be run, or an option is out of range.
        InputError: The model or the devices are missing or unknown.
    """
    devices = _device_count(world_size, nnodes, nproc_per_node, gpu)
    fixed = parse_fixed(fix or ())
    _check_sizes(batch, seq)
    if precision not in (None, "bf16", "fp16", "fp32"):
        raise InputError(
            f"--precision {precision}: Plait does not train in it; use bf16, fp16 or fp32"
        )
    notes: list[str] = []
    overrides = _overrides(
        batch=batch, seq=seq, precision=precision, compiled=compiled, model=model, fixed=fixed
    )
    training_file = _read_file(file, overrides, notes)
    config = None if training_file is None else training_file.config

    sequence = seq
    planned_model = None
    if config is not None:
        if sequence is None and config.data is not None:
            sequence = config.data.sequence_length
        planned_model = model_of(config)
    sequence = sequence or 4096
    if model is not None:
        planned_model = find_model(model, sequence=sequence)
    if planned_model is None:
        raise InputError(
            "--model: nothing to plan for; name a public model (`plait plan models`), a"
            " config.json, or a training configuration"
        )

    if devices is None and gpu is None:
        devices = default_processes() if config is None else process_count(config)
    machines = cluster_for(
        gpus=devices,
        gpu=gpu,
        per_node=nproc_per_node,
        memory_gib=memory_gib,
        network=network,
    )
    precision = precision or _default_precision(file, config, machines, notes)
    batch = _batch_size(batch, file, config, sequence, machines, notes)
    if machines.device.name == "cpu" and gpu is None:
        notes.append(
            "no GPU here: planned for this machine's processes; name others with --gpu and"
            " --world-size"
        )
    unknown = unknown_layers(planned_model.architecture)
    notes += [note for note in (unknown, _too_long(planned_model.section, sequence)) if note]
    # Public models are known to be accepted.
    if model is None or named(model) is None:
        described = planned_model.section.get("config")
        if described and (refusal := why_refused(described)):
            notes.append(f"`plait train` refuses this model: {refusal}")

    request = Request(planned_model, machines, batch, sequence, precision, compiled)
    notes += formula_notes(request)
    if training_file is None:
        return PlanQuery(request, {}, {}, fixed, notes)

    request = with_settings_of(training_file.config, request)
    layout = {}
    if not (keeps_layout and has_complete_layout(file, training_file.tree)):
        layout = fixed_by(training_file)
    if layout:
        notes.append(
            f'{file} fixes {format_fixed(layout)}; leave a key out or write "auto" to have it'
            " chosen"
        )
    not_modelled = unmodelled(training_file.config)
    if not_modelled:
        notes.append(
            f"plans do not model {', '.join(not_modelled)}; the times and bytes lack their effect"
        )
    return PlanQuery(
        request, dict(training_file.raw), dict(training_file.tree), layout | fixed, notes
    )


def _check_sizes(batch: int | None, seq: int | None) -> None:
    for name, value in (("batch", batch), ("seq", seq)):
        if value is None or 1 <= value <= _MAX_SIZE:
            continue
        rule = f"the planner accepts at most {_MAX_SIZE:,}"
        remedy = "pass fewer"
        if value < 1:
            rule = _MIN_RULES[name]
            remedy = "pass 1 or more"
        raise ConfigError(Problem(f"--{name}", value, rule, remedy))


def _default_precision(
    file: Path | None, config: Config | None, machines: hardware.Cluster, notes: list[str]
) -> str:
    """Return the precision of the file, or the best precision of the devices."""
    if config is not None:
        precision = precision_of(config)
        if precision == "fp32":
            notes.append(
                f"fp32: {file} enables neither bf16 nor fp16; --precision bf16 plans and writes"
                " bf16"
            )
        if precision is not None:
            return precision
    if machines.device.name == "cpu":
        return "fp32"
    # bfloat16 first, because it needs no loss scale.
    return next(name for name in ("bf16", "fp16", "fp32") if name in machines.device.flops)


def _batch_size(
    batch: int | None,
    file: Path | None,
    config: Config | None,
    sequence: int,
    machines: hardware.Cluster,
    notes: list[str],
) -> int:
    """Return the samples per step: those of the file with the options applied, or a default."""
    if config is not None and isinstance(config.train_batch_size, int):
        return config.train_batch_size
    if config is not None and isinstance(config.train_micro_batch_size_per_gpu, int):
        per_device = config.train_micro_batch_size_per_gpu
        if isinstance(config.gradient_accumulation_steps, int):
            per_device *= config.gradient_accumulation_steps
        if batch is None:
            batch = per_device * machines.devices
            notes.append(
                f"batch {batch}: {per_device} samples per device as in {file}; set another with"
                " --batch"
            )
    if batch is None:
        batch = max(1, round(_DEFAULT_TOKENS / sequence / machines.devices)) * machines.devices
        notes.append(f"batch {batch}: about 4 Mi tokens per step; set it with --batch")
    return batch


def _too_long(section: Mapping[str, Any], sequence: int) -> str | None:
    """Return a note if samples are longer than the model's configuration allows."""
    config = section.get("config") or {}
    for name in ("max_position_embeddings", "n_positions"):
        limit = config.get(name)
        if not isinstance(limit, int):
            continue
        # The first field that exists decides.
        if sequence <= limit:
            return None
        return (
            f"{name} is {limit}, and `plait train` refuses samples of {sequence} tokens; raise it"
            " in the model's configuration, or lower --seq"
        )
    return None


def has_complete_layout(file: Path | None, base: Mapping[str, Any]) -> bool:
    """Return True if a file defines a complete layout, so that no search is needed."""
    return (
        file is not None
        and "parallel" in base
        and "train_micro_batch_size_per_gpu" in base
        and not auto_paths(base)
    )


def _device_count(
    world_size: int | None, nnodes: int | None, nproc_per_node: int | None, gpu: str | None
) -> int | None:
    """Return the number of all devices, or None if no option defines it.

    Raises:
        InputError: The options contradict each other.
    """
    if nnodes is None:
        return world_size
    per_node = nproc_per_node
    if per_node is None and gpu is not None:
        per_node = int(hardware.device(gpu).devices_per_node)
    if per_node is None:
        raise InputError(
            f"--nnodes {nnodes}: the number of GPUs per machine is not known; add --nproc-per-node,"
            " or add --gpu to use the number that machines with that GPU usually have"
        )
    if world_size is not None and world_size != nnodes * per_node:
        raise InputError(
            f"--world-size {world_size}: {nnodes} machines of {per_node} GPUs have"
            f" {nnodes * per_node} GPUs; leave --world-size out, or correct the other options"
        )
    return nnodes * per_node


def _overrides(
    *,
    batch: int | None,
    seq: int | None,
    precision: str | None,
    compiled: bool,
    model: str | None,
    fixed: Mapping[str, int],
) -> dict[str, Any]:
    """Return the values with which options override keys of a file.

    Options that are None override nothing. A key whose value is None in the result is removed."""
    values = {
        "train_batch_size": batch,
        "data.sequence_length": seq,
        "compile.enabled": compiled or None,
    }
    overrides: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if precision is not None:
        for name in ("fp16", "bf16"):
            # None removes the other key, because both dtypes together are refused.
            overrides[f"{name}.enabled"] = True if name == precision else None
    if model is not None:
        overrides["model"] = None
    return overrides | {PATHS[name]: None for name in fixed}


def _read_file(file: Path | None, options: Mapping[str, Any], notes: list[str]) -> File | None:
    """Read a training file, override values with options, and add a note for each override."""
    if file is None:
        return None
    document, before = examine_source(file)
    overrides = []
    for path, value in options.items():
        # Removing a key that does not exist would create the sections above it.
        if value is not None or value_at(before.tree, path) is not None:
            overrides.append((tuple(path.split(".")), value))
    after = examine(document, overrides)
    for path in options:
        old = value_at(before.tree, path)
        new = value_at(after.tree, path)
        if old not in (None, "auto") and old != new:
            shown = "a section" if isinstance(old, dict) else old
            notes.append(
                f"{before.written.get(path, path)} = {shown} of {file} is overridden by the command"
                " line"
            )
    return read_file(after)


def cluster_for(
    *,
    gpus: int | None,
    gpu: str | None = None,
    per_node: int | None = None,
    memory_gib: float | None = None,
    network: float | None = None,
) -> hardware.Cluster:
    """Return the devices of a plan: those that options name, else those of this machine.

    Args:
        gpus: Total number of devices.
        gpu: Name of the GPU in the catalogue.
        per_node: Number of devices per machine.
        memory_gib: Memory of a device in GiB.
        network: Bandwidth of a device to other machines in GB/s.

    Raises:
        InputError: A value is missing or unknown.
    """
    for name, value in (("--memory-gib", memory_gib), ("--network", network)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(
                f"{name} {value:g}: must be a number greater than 0; correct it, or leave it out"
            )
    changes: dict[str, float | None] = {"memory_bytes": None, "nic_bandwidth": None}
    if memory_gib is not None:
        changes["memory_bytes"] = memory_gib * GIB
    if network is not None:
        changes["nic_bandwidth"] = network * 1e9
    if gpu is not None:
        if gpus is None:
            raise InputError(
                f"--gpu {gpu}: the number of GPUs is not known; add it, for example --world-size 8"
            )
        return hardware.cluster(gpu, gpus, devices_per_node=per_node, **changes)
    return _local_cluster(gpus, per_node, changes)


def live_devices() -> tuple[Topology, str]:
    """Return (machines, reported name of the devices) for the running processes."""
    topology = discover()
    name = "cpu"
    if topology.device_type == accelerator.NAME:
        name = accelerator.model_name()
    return topology, name


def live_cluster() -> hardware.Cluster:
    """Return the devices of the running processes for the planner.

    Raises:
        InputError: The catalogue lacks these GPUs.
    """
    return hardware.cluster_of(*live_devices())


def _local_cluster(
    gpus: int | None, per_node: int | None, changes: dict[str, float | None]
) -> hardware.Cluster:
    """Return a cluster of devices like those of this machine."""
    topology, name = live_devices()
    if gpus is None:
        return hardware.cluster_of(topology, name, **changes)
    local_devices = topology.nodes[0].devices
    memory = topology.memory_bytes
    if per_node is None:
        per_node = gpus
        if name != "cpu":
            per_node = min(gpus, local_devices)
    if name == "cpu" and memory is not None:
        # The processes of a machine share its memory.
        memory = memory * local_devices // per_node
    changes["memory_bytes"] = changes["memory_bytes"] or memory
    return hardware.cluster(name, gpus, devices_per_node=per_node, **changes)


def read_calibration(path: Path | None, request: Request) -> Calibration | None:
    """Return the constants in a file that `plait calibrate` wrote, or None without a path.

    Raises:
        InputError: The file belongs to another device.
    """
    if path is None:
        return None
    gpu = str(request.cluster.device.name)
    per_node = min(request.cluster.devices, int(request.cluster.device.devices_per_node))
    # Two CPU machines differ, while GPUs of one name are alike.
    machine = machine_name(per_node) if gpu == "cpu" else ""
    calibration, origin = calibrate.load_calibration(path)
    calibrate.refuse_other(path, origin, gpu=gpu, machine=machine)
    return calibration


def planned_file(
    file: Path,
    overrides: list[str],
    *,
    processes: int | None,
    fresh: bool,
    say: Callable[[str], None],
) -> Path | None:
    """Plan the layout of a training file, and return the file with the planned layout.

    Args:
        file: The training file.
        overrides: Values of --set.
        processes: Number of processes. None for the number that the file starts.
        fresh: Whether to plan again if the file was planned before.
        say: Receives lines for the console.

    Returns:
        The planned file, or None if the layout has no "auto" that requires a search.

    Raises:
        ConfigError: The file is not valid.
        InputError: The file cannot be planned.
    """
    _, document = examine_source(file, overrides)
    searched_keys = paths_to_search(document.tree)
    if not searched_keys:
        return None
    training_file = read_file(document)
    run = training_file.config.run
    folder = f"runs/{file.stem}"
    if run is not None and "folder" in run.model_fields_set:
        folder = str(run.folder)
    path = user_path(f"{folder}.planned.json", "run.folder")
    cluster = cluster_for(gpus=processes or process_count(training_file.config))

    keys = ", ".join(searched_keys)
    if not fresh and _planned_for(path) == (document.raw, cluster.devices):
        say(f'{keys}: "auto" was planned before ({path})')
        return path

    _, plan = complete(training_file, cluster=cluster)
    write(plan, path, document.raw)
    best = plan.best[0]
    not_modelled = unmodelled(training_file.config)
    if not_modelled:
        say(f"plans do not model {', '.join(not_modelled)}; the prediction lacks their effect")
    say(
        f'{keys}: "auto" is {describe(best.layout)}, {best.seconds:.3g} s per step predicted, of'
        f" {plan.candidates:,} layouts ({path})"
    )
    return path


def refuse_auto(file: Path, overrides: list[str]) -> None:
    """Raise InputError if a file must be planned. The processes of a launcher call this.

    These processes cannot plan, because the plan decides how they are started.
    """
    _, document = examine_source(file, overrides)
    searched_keys = paths_to_search(document.tree)
    if searched_keys and not document.problems:
        raise InputError(
            f'{file}: {", ".join(searched_keys)} = "auto" is planned before processes are started,'
            f" but these are running already; run `plait plan {file} --out planned.json` and"
            f" train with planned.json, or use `plait train {file}` on one machine"
        )


def _planned_for(path: Path) -> tuple[Mapping[str, Any], int] | None:
    """Return (configuration, number of devices) that a planned file was planned for."""
    try:
        if not path.is_file():
            return None
        content = json.loads(path.with_suffix(".plan.json").read_text(encoding="utf-8"))
        return content["asked"], content["cluster"]["devices"]
    except (OSError, ValueError, KeyError, TypeError):
        # A damaged file is planned again.
        return None
