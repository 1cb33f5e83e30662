"""Rows of `plait doctor --validate`, most valuable first, with planned seconds.

A row is one check with its settings. Planned times were measured on an H100 and rounded up. A
layout with more ranks than the machine has GPUs runs with several ranks per GPU over gloo. This
tests the layout's numerical results but not NCCL, so such rows run on request only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from plait.errors import InputError
from plait.sizes import GIB
from plait.validation.rows import Row
from plait.validation.runner import LAUNCH_PLANNED_SECONDS

MOST_GPUS = 8
RANK_BYTES = 1.0 * GIB
"""Device memory per rank where several ranks share a GPU: context, libraries, a small model."""
SIMULATED_LIMIT_SECONDS = 900.0
"""Shortest time limit of a row on the simulated device, which computes on the CPU."""
FACTS_PLANNED_SECONDS = 15.0
"""Planned time of the command itself and of the process that looks up versions and devices."""

HOST_MEMORY = {"device": "cpu", "pin_memory": True}
FP32: Mapping[str, Any] = {}
BF16: Mapping[str, Any] = {"bf16": {"enabled": True}}
FP16: Mapping[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 10}}
PRECISIONS = (FP32, BF16, FP16)
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zero-bubble",
    "zbv",
    "dualpipev",
)
PACKAGES_OF_PEERS = {"deepspeed": "DeepSpeed", "liger_kernel": "Liger"}


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that determine which rows can run on it."""

    gpus: int
    memory_bytes: int
    """Memory of the smallest GPU."""
    simulated: bool = False
    transformers: bool = True
    installed_peers: tuple[str, ...] = ()
    """Packages of PACKAGES_OF_PEERS that are installed."""


def rows_of(machine: Machine, only: Sequence[str] = ()) -> list[Row]:
    """Return the rows for a machine, most valuable first.

    Args:
        machine: The machine. Rows that cannot run on it have the reason in `unavailable`.
        only: Patterns of row names. If empty, the rows that run by default are returned.

    Raises:
        InputError: A pattern matches no row.
    """
    gpus = min(machine.gpus, MOST_GPUS)
    rows = [
        *_ceilings(),
        *_waits(),
        *_parity(),
        # Eager throughput comes before everything that compiles, which takes far longer.
        *_throughput(("eager",), machine),
        *_on_several_gpus(gpus),
        *_compiled_parity(),
        *_throughput(("compiled", "liger", "deepspeed"), machine),
        *_profile(),
        *_memory(),
        *_kernels(),
        *_layouts(gpus),
        *_compression(),
        *_checkpoints(),
        *_more_memory(),
        *_planned(),
    ]
    for pattern in only:
        if not any(_matches(row, pattern) for row in rows):
            # A dictionary keeps the order of the catalogue and names each check once.
            checks = ", ".join(dict.fromkeys(row.name.split("/")[0] for row in rows))
            raise InputError(
                f"--only {pattern}: no row has this name; use one of {checks}, or a"
                " pattern such as 'parity/*' for all rows of a check"
            )
    if only:
        chosen = [row for row in rows if any(_matches(row, pattern) for pattern in only)]
    else:
        chosen = [row for row in rows if row.by_default]
    return [_on_machine(machine, gpus, row) for row in chosen]


def planned_seconds(rows: Sequence[Row]) -> float:
    """Return the planned seconds of a validation with these rows, including their launches."""
    planned = 0.0
    launches = set()
    for row in rows:
        if row.unavailable:
            continue
        planned += row.planned_seconds
        # Rows with as many ranks share a launch, except for those with their own process.
        launches.add((row.ranks, row.name if row.own_process else ""))
    return FACTS_PLANNED_SECONDS + LAUNCH_PLANNED_SECONDS * len(launches) + planned


def _matches(row: Row, pattern: str) -> bool:
    return fnmatch(row.name, pattern) or row.name.split("/")[0] == pattern


def _on_machine(machine: Machine, gpus: int, row: Row) -> Row:
    """Return the row. If it cannot run on the machine, its `unavailable` is set to the reason."""
    if machine.simulated:
        row = replace(row, least_limit_seconds=SIMULATED_LIMIT_SECONDS)
    if row.unavailable:
        return row
    # Ceilings are measured with plain tensors and need no model.
    if not machine.transformers and not row.check.startswith("ceilings:"):
        # Not `install_line`, which names a folder: the validation's document has no paths.
        reason = (
            "Transformers, which has the models of the checks, is not installed; pip install"
            " '.[hf]' in a clone"
        )
        return replace(row, unavailable=reason)
    # Rounded up: the fullest GPU decides.
    ranks_per_gpu = -(-row.ranks // gpus)
    needed = ranks_per_gpu * RANK_BYTES
    if ranks_per_gpu > 1 and not machine.simulated and machine.memory_bytes < needed:
        reason = (
            f"{ranks_per_gpu} ranks on a GPU need {needed / GIB:.0f} GiB, and it has"
            f" {machine.memory_bytes / GIB:.1f} GiB"
        )
        return replace(row, unavailable=reason)
    return row


def _ceilings() -> list[Row]:
    return [
        Row(
            "ceilings/device",
            "bytes per second of a copy on the device, FLOP/s of an 8,192-cubed bfloat16 product",
            "ceilings:device",
            planned_seconds=2,
        ),
        Row(
            "ceilings/host-link",
            "bytes per second between pinned host memory and the device",
            "ceilings:host_link",
            planned_seconds=2,
        ),
    ]


def _waits() -> list[Row]:
    def row(
        name: str, title: str, expected: int, config: Mapping[str, Any], planned: float = 2
    ) -> Row:
        return Row(
            f"waits/{name}",
            f"waits of the host for the device per step: {title}",
            "profile:per_step",
            planned_seconds=planned,
            settings={"config": dict(config), "expected": expected},
        )

    # DeepSpeed's default asks whether all gradients are finite, which reads one number per step.
    unchecked = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    return [
        # The first row of a process loads kernels.
        row(
            "checked",
            "stage 0, bfloat16, whose overflow check reads one number per step",
            1,
            BF16,
            10,
        ),
        row("stage-0", "stage 0, bfloat16", 0, unchecked),
        row("stage-1", "stage 1, bfloat16", 0, {**unchecked, "zero_optimization": {"stage": 1}}),
        row("stage-3", "stage 3, bfloat16", 0, {**unchecked, "zero_optimization": {"stage": 3}}),
        row("fp16", "float16, whose loss scale reads one number per step", 1, FP16),
        row(
            "loss-in-chunks",
            "loss in chunks",
            0,
            {**unchecked, "parallel": {"loss_chunk_tokens": 128}},
        ),
        row(
            "recompute",
            "full recomputation",
            0,
            {**unchecked, "parallel": {"recompute": {"mode": "full"}}},
        ),
    ]


def _parity() -> list[Row]:
    """Return parity rows with one rank, which share the float64 trace that the CPU computes."""
    offload = {"stage": 3, "offload_optimizer": HOST_MEMORY, "offload_param": HOST_MEMORY}

    def row(name: str, title: str, planned: float, config: Mapping[str, Any]) -> Row:
        return Row(
            f"parity/{name}",
            title,
            "parity:layout",
            planned_seconds=planned,
            settings={"config": dict(config)},
        )

    return [
        row("bf16", "bfloat16, stage 0", 9, BF16),
        row("bf16-stage-3", "bfloat16, stage 3", 2, {**BF16, "zero_optimization": {"stage": 3}}),
        row("fp16", "float16 with a loss scale", 9, FP16),
        row(
            "recompute-full",
            "full recomputation",
            2,
            {**BF16, "parallel": {"recompute": {"mode": "full"}}},
        ),
        row(
            "recompute-selective",
            "selective recomputation",
            2,
            {**BF16, "parallel": {"recompute": {"mode": "selective"}}},
        ),
        row("loss-in-chunks", "loss in chunks", 2, {**BF16, "parallel": {"loss_chunk_tokens": 32}}),
        row(
            "host-offload",
            "parameters and optimizer states in host memory",
            2,
            {**BF16, "zero_optimization": offload},
        ),
    ]


def _compiled_parity() -> list[Row]:
    """Return parity rows with torch.compile. They run late, because compilation is slow."""
    return [
        Row(
            "parity/compile",
            "compiled blocks",
            "parity:layout",
            planned_seconds=30,
            settings={
                "config": {**BF16, "compile": {"enabled": True}},
                # float64 would be compiled as well, for as long again. The other rows cover it.
                "passes": ["configured"],
            },
        ),
        Row(
            "parity/attention-kernels",
            "kernels of context parallelism compared with float64: FlashAttention, efficient"
            " attention, FlexAttention",
            "attention:kernels",
            planned_seconds=55,
        ),
    ]


def _throughput(names: Sequence[str], machine: Machine) -> list[Row]:
    variants: dict[str, tuple[str, float, list[str], str]] = {
        "eager": (
            "Plait, FSDP2 and a hand-written Llama",
            55,
            ["plait", "fsdp2", "ceiling"],
            "",
        ),
        "compiled": (
            "Plait, FSDP2 and a hand-written Llama with compiled blocks",
            80,
            ["plait-compiled", "fsdp2-compiled", "ceiling-compiled"],
            "",
        ),
        "liger": (
            "Plait and FSDP2 with Liger's kernels",
            36,
            ["plait-liger", "fsdp2-liger"],
            "liger_kernel",
        ),
        "deepspeed": ("Plait and DeepSpeed ZeRO 3", 40, ["plait", "deepspeed"], "deepspeed"),
    }
    rows = []
    for name in names:
        title, planned, contenders, package = variants[name]
        missing = bool(package) and package not in machine.installed_peers
        more: dict[str, Any] = {"depths": name == "eager"}
        if name == "deepspeed":
            # DeepSpeed holds 20 bytes per parameter, Plait 16, and keeps them after its engine is
            # destroyed. After memory ran out on an H100, the process could not use the device.
            more = {"layer_share": 0.7, "rounds": 1}
        rows.append(
            Row(
                f"throughput/{name}",
                f"a Llama of 8B width, 8,192 tokens: {title}",
                "throughput:compare",
                planned_seconds=planned,
                settings={"contenders": contenders, **more},
                own_process=name == "deepspeed",
                unavailable=f"{PACKAGES_OF_PEERS[package]} is not installed" if missing else "",
            )
        )
    return rows


def _on_several_gpus(gpus: int) -> list[Row]:
    """Return rows that measure NCCL. They need one GPU per rank and use all GPUs."""
    one_gpu = (
        "there is one GPU; ranks that share a GPU communicate through host memory and do not test"
        " NCCL"
    )
    odd = f"{gpus} GPUs cannot be split into pairs"
    without = one_gpu if gpus == 1 else ""
    without_pairs = without or (odd if gpus % 2 else "")
    half = max(1, gpus // 2)
    sharded = {**BF16, "zero_optimization": {"stage": 3}, "parallel": {"dp_shard": gpus}}
    tensor = {**BF16, "parallel": {"tp": 2, "dp_replicate": half}}
    pipeline = {
        **BF16,
        "parallel": {"pp": 2, "dp_replicate": half},
        "gradient_accumulation_steps": 4,
    }
    ranks = max(2, gpus)

    def parity(name: str, title: str, config: Mapping[str, Any], unavailable: str) -> Row:
        return Row(
            f"nccl/parity-{name}",
            f"parity of {title} over NCCL",
            "parity:layout",
            ranks,
            12,
            {"config": dict(config)},
            unavailable=unavailable,
        )

    def step(
        name: str, title: str, contenders: Sequence[str], unavailable: str, accumulation: int = 1
    ) -> Row:
        return Row(
            f"nccl/step-{name}",
            f"step time of {title}",
            "throughput:compare",
            ranks,
            35,
            {"contenders": list(contenders), "accumulation": accumulation},
            unavailable=unavailable,
        )

    return [
        Row(
            "nccl/collectives",
            "collectives over all GPUs",
            "ceilings:collectives",
            ranks,
            12,
            unavailable=without,
        ),
        parity("zero-3", "ZeRO 3", sharded, without),
        parity("tp", "tensor parallelism", tensor, without_pairs),
        parity("pp", "a pipeline", pipeline, without_pairs),
        step("zero-3", "ZeRO 3 compared with FSDP2", ["plait", "fsdp2"], without),
        step(
            "tp",
            "tensor parallelism compared with DTensor's",
            ["plait-tp", "torch-tp"],
            without_pairs,
        ),
        step(
            "pp",
            "a pipeline compared with torch.distributed.pipelining",
            ["plait-pp", "torch-pp"],
            without_pairs,
            4,
        ),
    ]


def _profile() -> list[Row]:
    return [
        Row(
            f"profile/{name}",
            f"kernels, gaps and idle time of a step of {title}",
            "profile:step",
            planned_seconds=8,
            settings={"contender": name},
        )
        for name, title in (("plait", "Plait"), ("fsdp2", "FSDP2"))
    ]


def _memory() -> list[Row]:
    layouts = {
        "stage-0": BF16,
        "stage-3": {**BF16, "zero_optimization": {"stage": 3}},
        "recompute": {**BF16, "parallel": {"recompute": {"mode": "full"}}},
        "loss-in-chunks": {**BF16, "parallel": {"loss_chunk_tokens": 256}},
    }
    rows = []
    for name, config in layouts.items():
        rows.append(
            Row(
                f"memory/{name}",
                f"peak memory of a step and its prediction: {name}",
                "device_memory:peaks",
                planned_seconds=4,
                settings={"cases": {name: config}},
            )
        )
    rows += [
        Row(
            "offload/optimizer",
            "optimizer states in host memory: seconds per step, largest model by extrapolation",
            "device_memory:optimizer",
            planned_seconds=17,
        ),
        Row(
            "streaming/host-rate",
            "weights streamed from host memory: share of the link",
            "device_memory:weights",
            planned_seconds=12,
            settings={"source": "host", "rate": True},
        ),
    ]
    return rows


def _kernels() -> list[Row]:
    return [
        Row(
            "kernels/calibration",
            "times of products, attention, norms, loss and the optimizer, as a calibration file",
            "kernels:calibrate",
            planned_seconds=8,
        )
    ]


# The rows below run on request only: `--only parity`, `--only checkpoint` and so on.


def _layouts(gpus: int) -> list[Row]:
    def row(name: str, title: str, ranks: int, precision: Mapping[str, Any], **config: Any) -> Row:
        return Row(
            f"parity/layout-{name}",
            title,
            "parity:layout",
            ranks,
            planned_seconds=8 + 3 * ranks,
            settings={"config": {**precision, **config}},
            by_default=False,
        )

    def zero(stage: int, **more: Any) -> dict[str, Any]:
        return {"stage": stage, **more}

    pairs = {"dp_shard": 2}
    offloaded = {"offload_optimizer": HOST_MEMORY, "offload_param": HOST_MEMORY}
    four_steps = {"gradient_accumulation_steps": 4}
    pipelines = []
    for index, schedule in enumerate(SCHEDULES):
        # Each schedule runs in one precision, and every precision occurs among the schedules.
        pipeline = row(
            f"pp-{schedule}",
            f"pipeline of 2 ranks, {schedule}",
            2,
            PRECISIONS[index % 3],
            parallel={"pp": 2, "pipeline": {"schedule": schedule}},
            **four_steps,
        )
        pipelines.append(pipeline)
    rows = [
        row(
            "activations-on-host",
            "activations in host memory",
            1,
            FP32,
            parallel={"activation_offload": {"fraction": 1.0}},
        ),
        row(
            "zero-0",
            "ZeRO 0, 2 ranks",
            2,
            FP32,
            zero_optimization=zero(0),
            parallel={"dp_replicate": 2},
        ),
        row("zero-1", "ZeRO 1, 2 ranks", 2, BF16, zero_optimization=zero(1), parallel=pairs),
        row("zero-2", "ZeRO 2, 2 ranks", 2, FP16, zero_optimization=zero(2), parallel=pairs),
        row("zero-3", "ZeRO 3, 2 ranks", 2, BF16, zero_optimization=zero(3), parallel=pairs),
        row(
            "zero-3-recompute",
            "ZeRO 3 with recomputation, 2 ranks",
            2,
            BF16,
            zero_optimization=zero(3),
            parallel={**pairs, "recompute": {"mode": "full"}},
        ),
        row(
            "zero-2-offload",
            "ZeRO 2, optimizer states in host memory, 2 ranks",
            2,
            BF16,
            zero_optimization=zero(2, offload_optimizer=HOST_MEMORY),
            parallel=pairs,
        ),
        row(
            "zero-3-offload",
            "ZeRO 3, parameters and optimizer states in host memory, 2 ranks",
            2,
            BF16,
            zero_optimization=zero(3, **offloaded),
            parallel=pairs,
        ),
        row("tp", "tensor parallelism, 2 ranks", 2, FP32, parallel={"tp": 2}),
        row(
            "tp-sequence",
            "tensor and sequence parallelism, 2 ranks",
            2,
            BF16,
            parallel={"tp": 2, "sequence_parallel": True},
        ),
        *pipelines,
        row(
            "tp-zero-3",
            "2 x tensor parallelism, 2 x ZeRO 3",
            4,
            BF16,
            zero_optimization=zero(3),
            parallel={"tp": 2, "dp_shard": 2},
        ),
        row(
            "pp-zero-2",
            "2 pipeline stages, 2 x ZeRO 2",
            4,
            BF16,
            zero_optimization=zero(2),
            parallel={"pp": 2, "dp_shard": 2},
            **four_steps,
        ),
        row("pp-4", "pipeline of 4 ranks", 4, FP32, parallel={"pp": 4}, **four_steps),
        row(
            "3d",
            "2 pipeline stages, 2 x tensor parallelism, 2 x ZeRO 3",
            8,
            BF16,
            zero_optimization=zero(3),
            parallel={"pp": 2, "tp": 2, "dp_shard": 2},
            **four_steps,
        ),
    ]
    if gpus > 2:
        rows.append(
            row(
                f"all-{gpus}-zero-0",
                f"ZeRO 0 over all {gpus} GPUs",
                gpus,
                BF16,
                zero_optimization=zero(0),
                parallel={"dp_replicate": gpus},
            )
        )
    # Rows with equal numbers of ranks share a launch. The sort is stable and keeps their order.
    return sorted(rows, key=lambda row: row.ranks)


def _compression() -> list[Row]:
    settings: dict[str, tuple[int, dict[str, Any]]] = {
        "int8": (0, {"compress_gradients": "int8"}),
        "int4-feedback": (2, {"compress_gradients": "int4", "error_feedback": True}),
        "weights": (3, {"compress_gradients": "int8", "compress_weights": "int8"}),
    }
    rows: list[Row] = []
    for name, (stage, parallel) in settings.items():
        rows.append(
            Row(
                f"compression/{name}",
                f"compressed communication ({name}) at ZeRO {stage}, 2 ranks",
                "parity:compression",
                2,
                planned_seconds=15,
                settings={
                    "config": {
                        "zero_optimization": {"stage": stage},
                        "parallel": {"dp_shard" if stage else "dp_replicate": 2, **parallel},
                    }
                },
                by_default=False,
            )
        )
    return rows


def _checkpoints() -> list[Row]:
    # A step has the same number of samples under each layout.
    once = {"gradient_accumulation_steps": 1}
    twice = {"gradient_accumulation_steps": 2}
    zero_3 = {**once, "zero_optimization": {"stage": 3}, "parallel": {"dp_shard": 2}}
    stages = {**twice, "parallel": {"pp": 2}}
    offload = {"stage": 2, "offload_optimizer": HOST_MEMORY}
    offloaded = {**once, "zero_optimization": offload, "parallel": {"dp_shard": 2}}
    tensor = {**twice, "parallel": {"tp": 2}}
    cases = {
        "zero-3-to-pipeline": ("ZeRO 3, then a pipeline", zero_3, stages),
        "tensor-to-offload": ("tensor parallelism, then offload", tensor, offloaded),
    }
    rows: list[Row] = []
    for name, (title, saving, loading) in cases.items():
        rows.append(
            Row(
                f"checkpoint/{name}",
                "a checkpoint that is written asynchronously and loaded on another layout:"
                f" {title}",
                "parity:checkpoint",
                2,
                planned_seconds=20,
                settings={"saving": saving, "loading": loading},
                by_default=False,
            )
        )
    return rows


def _more_memory() -> list[Row]:
    two_ranks = {
        "zero-2": {**BF16, "zero_optimization": {"stage": 2}, "parallel": {"dp_shard": 2}},
        "zero-3": {**BF16, "zero_optimization": {"stage": 3}, "parallel": {"dp_shard": 2}},
        "tp": {**BF16, "parallel": {"tp": 2}},
        "pp": {**BF16, "parallel": {"pp": 2}},
    }
    largest = (
        ("trains", "the model that is predicted to take 95 % of the memory trains", 0.95, True),
        (
            "does-not-fit",
            "the model that is predicted to take 110 % runs out of memory",
            1.10,
            False,
        ),
    )
    rows = []
    for source in ("host", "files"):
        streaming = Row(
            f"streaming/{source}",
            f"generation with weights streamed from {source}: the tokens of the resident model",
            "device_memory:weights",
            planned_seconds=30,
            settings={"source": source},
            by_default=False,
        )
        rows.append(streaming)

    memory = Row(
        "memory/two-ranks",
        "peak memory of a step and its prediction, 2 ranks",
        "device_memory:peaks",
        2,
        planned_seconds=60,
        settings={"cases": two_ranks},
        own_process=True,
        by_default=False,
    )
    rows.append(memory)

    for name, title, share, trains in largest:
        # A process of its own, because the check limits the memory of its process or exhausts it.
        training = Row(
            f"largest/{name}",
            title,
            "device_memory:largest",
            planned_seconds=90,
            settings={"share": share, "trains": trains},
            own_process=True,
            by_default=False,
        )
        rows.append(training)
    return rows


def _planned() -> list[Row]:
    return [
        Row(
            f"planned/{name}",
            f"one rank of a planned layout of 8 GPUs ({name} 2) and the planner's time",
            "kernels:rank_of_plan",
            planned_seconds=60,
            settings={"fixed": fixed},
            own_process=True,
            by_default=False,
        )
        for name, fixed in (("tp", {"tp": 2, "pp": 1}), ("pp", {"tp": 1, "pp": 2}))
    ]
