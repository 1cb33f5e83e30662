"""From the command line and files to what is planned. Looks at this machine where no GPU is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import InputError

if TYPE_CHECKING:
    from plait.planner.calibrate import Calibration
    from plait.planner.hardware import Cluster
    from plait.planner.search import Request

_TOKENS = 4 * 2**20
"""Tokens of a step where no batch is given: usual for models of more than a few billion parameters."""


def read_request(
    *,
    file: Path | None,
    model: str | None,
    gpus: int | None,
    gpu: str | None,
    per_node: int | None,
    cluster: Path | None,
    batch: int | None,
    seq: int | None,
    precision: str | None,
    compiled: bool,
    memory_gib: float | None,
    network: float | None,
    everything: bool,
) -> tuple[Request, dict[str, Any], list[str]]:
    """(what is planned, the configuration that it changes, what was assumed). Raises InputError for what is missing or cannot be."""
    from plait.planner.models import Model, find_model, from_config
    from plait.planner.search import Request

    base: dict[str, Any] = {}
    notes: list[str] = []
    planned = None
    per_device = None
    states = "own"
    if file is not None:
        from plait.config.resolve import load
        from plait.config.source import read
        from plait.planner.auto import searched, without

        base = dict(read(file).tree)
        answered = searched(base)
        config = load(without(base, answered) if answered else file)
        if isinstance(config.train_batch_size, int):
            batch = batch or config.train_batch_size
        elif isinstance(config.train_micro_batch_size_per_gpu, int):
            accumulation = config.gradient_accumulation_steps
            per_device = config.train_micro_batch_size_per_gpu * (accumulation if isinstance(accumulation, int) else 1)
        if config.data is not None:
            seq = seq or config.data.sequence_length
        if config.model is not None and config.model.config is not None:
            vocab = config.data.vocab_size if config.data is not None else None
            planned = Model(from_config(config.model.config, source=str(file), vocab=vocab), {"config": dict(config.model.config)})
        elif config.model is not None and config.model.path is not None and model is None:
            planned = find_model(config.model.path)
        compiled = compiled or config.compile.enabled is True
        states = config.optimizer.states if config.optimizer is not None else states
    sequence = seq or 4096
    if model is not None:
        planned = find_model(model, sequence=sequence)
        base.pop("model", None)
    if planned is None:
        raise InputError(
            "--model: nothing to plan for; name a public model (`plait plan --list`), a config.json, or a training configuration"
        )
    machines = cluster_for(gpus=gpus, gpu=gpu, per_node=per_node, file=cluster, memory_gib=memory_gib, network=network)
    if precision is None:
        precision = next(p for p in ("bf16", "fp16", "fp32") if p in machines.device.flops)
        precision = "fp32" if machines.device.name == "cpu" else precision
    elif precision not in ("bf16", "fp16", "fp32"):
        raise InputError(f"--precision {precision}: not one that Plait trains in; use bf16, fp16 or fp32")
    if batch is None and per_device is not None:
        batch = per_device * machines.devices
        notes.append(f"batch {batch}: {per_device} samples a device, as {file} has it; set another with --batch")
    if batch is None:
        batch = max(1, round(_TOKENS / sequence / machines.devices)) * machines.devices
        notes.append(f"batch {batch}: about 4 Mi tokens a step; set it with --batch")
    if machines.device.name == "cpu" and gpu is None:
        notes.append("no GPU here: planned for this machine's processes; name others with --gpu and --gpus")
    return Request(planned, machines, batch, sequence, precision, compiled, everything, states), base, notes


def cluster_for(
    *,
    gpus: int | None,
    gpu: str | None = None,
    per_node: int | None = None,
    file: Path | None = None,
    memory_gib: float | None = None,
    network: float | None = None,
) -> Cluster:
    """The devices that are planned for: those that are named, else this machine's. Raises InputError for what is missing or unknown."""
    from plait.planner.hardware import cluster, cluster_of
    from plait.units import GIB

    changes: dict[str, float | None] = {
        "memory_bytes": memory_gib * GIB if memory_gib else None,
        "nic_bandwidth": network * 1e9 if network else None,
    }
    if file is not None:
        from plait.cluster.machines import load

        topology = load(file)
        if gpu is None and topology.device_type == "cuda":
            raise InputError(f"{file}: a cluster file does not say which GPUs they are; add --gpu, for example --gpu h100")
        return cluster_of(topology, gpu or "cpu", **changes)
    if gpu is not None:
        if gpus is None:
            raise InputError(f"--gpu {gpu}: how many? add --gpus, for example --gpus 8")
        return cluster(gpu, gpus, devices_per_node=per_node, **changes)
    from plait.cli.planning.calibrations import live_devices

    topology, name = live_devices()
    if gpus is not None:
        changes["memory_bytes"] = changes["memory_bytes"] or topology.memory_bytes
        return cluster(
            name, gpus, devices_per_node=per_node or min(gpus, topology.nodes[0].devices) if name != "cpu" else per_node or gpus, **changes
        )
    return cluster_of(topology, name, **changes)


def read_calibration(path: Path | None, request: Request) -> tuple[Calibration | None, list[str]]:
    """(constants of this device, notes): from a calibration file (.json), a history of runs (.jsonl) or a table (.csv); without a path from
    the runs that `plait train` has measured here, if there are any. Raises InputError for a file that says nothing of this device."""
    from plait.cli.planning.calibrations import default_history, from_history, runs_of_table
    from plait.cluster.topology import machine_name
    from plait.planner.calibrate import calibrate
    from plait.planner.calibration_file import load, refuse_other

    gpu = str(request.cluster.device.name)
    together = min(request.cluster.devices, int(request.cluster.device.devices_per_node))
    machine = machine_name(together) if gpu == "cpu" else ""
    if path is None:
        history = default_history()
        return from_history(history, gpu=gpu, machine=machine) if history.is_file() else (None, [])
    if str(path) == "none":
        return None, []
    if path.suffix == ".json":
        calibration, origin = load(path)
        refuse_other(path, origin, gpu=gpu, machine=machine)
        return calibration, []
    if path.suffix == ".jsonl":
        found, notes = from_history(path, gpu=gpu, machine=machine)
        if found is None:
            where = f"{gpu} ({machine})" if machine else gpu
            raise InputError(f"{path}: no run in it was measured on {where}; leave --calibrate out, or give a file that has some")
        return found, notes
    return calibrate(runs_of_table(path, gpu)[0]), []
