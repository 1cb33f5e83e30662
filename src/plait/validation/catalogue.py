"""The rows of a validation on a machine: which checks there are, at how many ranks, and what cannot run here. Pure.

A layout of more ranks than there are GPUs runs with several ranks on a GPU over gloo, where memory allows; what measures communication has
a GPU for every rank, or is not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from plait.errors import InputError
from plait.units import GIB
from plait.validation.rows import Row

MOST_GPUS = 8
RANK_BYTES = 1.0 * GIB
"""Of a device for one of several ranks on it: its context, libraries and a small model."""

_HOST = {"device": "cpu", "pin_memory": True}
_PRECISIONS: Sequence[dict[str, Any]] = ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}})
FP32, BF16, FP16 = _PRECISIONS
REDUCED_FP32 = {**BF16, "communication_data_type": "fp32"}
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")


@dataclass(frozen=True)
class Machine:
    """What decides which rows run."""

    gpus: int
    memory_bytes: int
    """Of the smallest GPU."""
    simulated: bool = False
    transformers: bool = True
    deepspeed: bool = False


def rows_of(machine: Machine, only: Sequence[str] = ()) -> list[Row]:
    """Every row for this machine; with `only` those whose names match one of these patterns. Raises InputError for a pattern that matches
    none."""
    gpus = min(machine.gpus, MOST_GPUS)
    rows = [
        *_links(gpus),
        *_memory(),
        *_parity(gpus),
        *_compression(),
        *_checkpoints(),
        *_streaming(),
        *_steps(gpus, machine),
        *_overlap(gpus),
        *_planned(),
        *_largest(),
    ]
    for pattern in only:
        if not any(_matches(row, pattern) for row in rows):
            checks = ", ".join(dict.fromkeys(row.name.split("/")[0] for row in rows))
            raise InputError(f"--only {pattern}: no row has this name; checks are {checks}, and --only 'parity/*' takes all of one")
    chosen = [row for row in rows if not only or any(_matches(row, pattern) for pattern in only)]
    return [_on(machine, gpus, row) for row in chosen]


def _matches(row: Row, pattern: str) -> bool:
    return fnmatch(row.name, pattern) or row.name.split("/")[0] == pattern


def _on(machine: Machine, gpus: int, row: Row) -> Row:
    """With the reason why it cannot run here."""
    if row.without:
        return row
    if not machine.transformers and not row.name.startswith("links/"):
        # Not `install_line`, which names a folder: the validation's document has no paths.
        missing = "Transformers is not installed, which makes the models of the checks; pip install '.[hf]' in a clone"
        return replace(row, without=missing)
    on_one = -(-row.ranks // gpus)
    if on_one > 1 and not machine.simulated and machine.memory_bytes < on_one * RANK_BYTES:
        needed = f"{on_one} ranks on a GPU need {on_one * RANK_BYTES / GIB:.0f} GiB"
        return replace(row, without=f"{needed}, and it has {machine.memory_bytes / GIB:.1f} GiB")
    return row


# ---- parity -------------------------------------------------------------------------------------------------------------------------


def _parity(gpus: int) -> list[Row]:
    def row(name: str, title: str, ranks: int, precision: Mapping[str, Any], **config: Any) -> Row:
        return Row(f"parity/{name}", title, "parity:layout", ranks, seconds=60 + 15 * ranks, settings={"config": {**precision, **config}})

    def zero(stage: int, **more: Any) -> dict[str, Any]:
        return {"stage": stage, **more}

    rows = [
        row("one-gpu-bf16", "one GPU, bfloat16", 1, BF16),
        row("one-gpu-fp16", "one GPU, float16 with a loss scale", 1, FP16),
        row("offload-all", "ZeRO 3, parameters and states in host memory", 1, BF16,
            zero_optimization=zero(3, offload_optimizer=_HOST, offload_param=_HOST)),
        row("activations-on-host", "activations in host memory", 1, FP32, parallel={"activation_offload": {"fraction": 1.0}}),
        row("zero0-fp32", "ZeRO 0, 2 ranks", 2, FP32, zero_optimization=zero(0), parallel={"dp_replicate": 2}),
        row("zero1-bf16", "ZeRO 1, 2 ranks", 2, BF16, zero_optimization=zero(1), parallel={"dp_shard": 2}),
        row("zero2-fp16", "ZeRO 2, 2 ranks", 2, FP16, zero_optimization=zero(2), parallel={"dp_shard": 2}),
        row("zero3-bf16", "ZeRO 3, 2 ranks", 2, BF16, zero_optimization=zero(3), parallel={"dp_shard": 2}),
        row("zero3-recompute-bf16", "ZeRO 3 with recomputation, 2 ranks", 2, BF16,
            zero_optimization=zero(3), parallel={"dp_shard": 2, "recompute": {"mode": "full"}}),
        row("zero2-offload-bf16", "ZeRO 2, states in host memory, 2 ranks", 2, BF16,
            zero_optimization=zero(2, offload_optimizer=_HOST), parallel={"dp_shard": 2}),
        row("zero3-offload-bf16", "ZeRO 3, parameters and states in host memory, 2 ranks", 2, BF16,
            zero_optimization=zero(3, offload_optimizer=_HOST, offload_param=_HOST), parallel={"dp_shard": 2}),
        row("tp-fp32", "tensor parallelism, 2 ranks", 2, FP32, parallel={"tp": 2}),
        row("tp-sequence-bf16", "tensor and sequence parallelism, 2 ranks", 2, BF16, parallel={"tp": 2, "sequence_parallel": True}),
        *(
            row(f"pp-{schedule}", f"pipeline of 2 ranks, {schedule}", 2, _PRECISIONS[index % 3],
                parallel={"pp": 2, "pipeline": {"schedule": schedule}}, gradient_accumulation_steps=4)
            for index, schedule in enumerate(SCHEDULES)
        ),
        row("tp-zero3-bf16", "2 x tensor parallelism, 2 x ZeRO 3", 4, BF16,
            zero_optimization=zero(3), parallel={"tp": 2, "dp_shard": 2}),
        row("pp-zero2-bf16", "2 stages, 2 x ZeRO 2", 4, BF16,
            zero_optimization=zero(2), parallel={"pp": 2, "dp_shard": 2}, gradient_accumulation_steps=4),
        row("pp4-fp32", "pipeline of 4 ranks", 4, FP32, parallel={"pp": 4}, gradient_accumulation_steps=4),
        row("3d-bf16", "2 stages, 2 x tensor parallelism, 2 x ZeRO 3", 8, BF16,
            zero_optimization=zero(3), parallel={"pp": 2, "tp": 2, "dp_shard": 2}, gradient_accumulation_steps=4),
    ]  # fmt: skip
    if gpus > 2:
        rows += [
            row(
                f"all-{gpus}-zero{stage}",
                f"ZeRO {stage} over all {gpus} GPUs",
                gpus,
                BF16,
                zero_optimization=zero(stage),
                parallel=parallel,
            )
            for stage, parallel in ((0, {"dp_replicate": gpus}), (3, {"dp_shard": gpus}))
        ]
    return sorted(rows, key=lambda row: row.ranks)


def _compression() -> list[Row]:
    settings: dict[str, tuple[int, dict[str, Any]]] = {
        "int8": (0, {"compress_gradients": "int8"}),
        "int4-feedback": (2, {"compress_gradients": "int4", "error_feedback": True}),
        "weights": (3, {"compress_gradients": "int8", "compress_weights": "int8"}),
    }
    return [
        Row(
            f"compression/{name}",
            f"compressed communication ({name}) at ZeRO {stage}, 2 ranks",
            "parity:compression",
            2,
            seconds=90,
            settings={
                "config": {
                    "zero_optimization": {"stage": stage},
                    "parallel": {"dp_shard" if stage else "dp_replicate": 2, **parallel},
                }
            },
        )
        for name, (stage, parallel) in settings.items()
    ]


def _checkpoints() -> list[Row]:
    one, two = {"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 2}  # as many samples a step under each layout
    zero3 = {**one, "zero_optimization": {"stage": 3}, "parallel": {"dp_shard": 2}}
    stages = {**two, "parallel": {"pp": 2}}
    offloaded = {**one, "zero_optimization": {"stage": 2, "offload_optimizer": _HOST}, "parallel": {"dp_shard": 2}}
    tensor = {**two, "parallel": {"tp": 2}}
    cases = {
        "zero3-to-pipeline": ("ZeRO 3, then in a pipeline", zero3, stages),
        "tensor-to-offload": ("tensor parallelism, then with states in host memory", tensor, offloaded),
    }
    return [
        Row(
            f"checkpoint/{name}",
            f"a checkpoint written beside the training: {title}",
            "parity:checkpoint",
            2,
            seconds=120,
            settings={"saving": saving, "loading": loading},
        )
        for name, (title, saving, loading) in cases.items()
    ]


def _streaming() -> list[Row]:
    rows = (("host", "generation, weights streamed from host memory: the tokens of the model in memory", {"source": "host"}),
            ("files", "generation, weights streamed from files: the tokens of the model in memory", {"source": "files"}),
            ("host-rate", "weights streamed from host memory against plain copies", {"source": "host", "rate": True}))  # fmt: skip
    return [
        Row(f"streaming/{name}", title, "streaming:weights", 1, 180, settings, apart="rate" in settings) for name, title, settings in rows
    ]


# ---- memory -------------------------------------------------------------------------------------------------------------------------


def _memory() -> list[Row]:
    alone = {
        "float32": {},
        "bfloat16": BF16,
        "recomputed": {**BF16, "parallel": {"recompute": {"mode": "full"}}},
    }
    two = {
        "zero2": {**BF16, "zero_optimization": {"stage": 2}, "parallel": {"dp_shard": 2}},
        "zero3": {**BF16, "zero_optimization": {"stage": 3}, "parallel": {"dp_shard": 2}},
        "tp": {**BF16, "parallel": {"tp": 2}},
        "pp": {**BF16, "parallel": {"pp": 2}},
    }
    return [
        Row("memory/one-rank", "peak memory against the prediction, one rank", "memory:peaks", 1, 180, {"cases": alone}, apart=True),
        Row("memory/two-ranks", "peak memory against the prediction, 2 ranks", "memory:peaks", 2, 240, {"cases": two}, apart=True),
    ]


def _largest() -> list[Row]:
    rows = (("trains", "the largest model by the prediction trains (95 %)", 0.95, True),
            ("does-not-fit", "a larger one runs out of memory (110 %)", 1.10, False))  # fmt: skip
    return [
        Row(f"largest/{name}", title, "memory:largest", 1, 240, {"share": share, "trains": trains}, apart=True)
        for name, title, share, trains in rows
    ]


# ---- times --------------------------------------------------------------------------------------------------------------------------


def _needs_two(gpus: int) -> str:
    return "" if gpus > 1 else "there is one GPU, and communication is measured between two or more"


def _links(gpus: int) -> list[Row]:
    return [
        Row("links/host", "copies between host and device", "links:host", 1, 60, apart=True),
        Row("links/gpus", f"collectives between {gpus} GPUs", "links:collectives", gpus, 90, apart=True, without=_needs_two(gpus)),
    ]


def _steps(gpus: int, machine: Machine) -> list[Row]:
    shard = {"dp_shard": gpus}
    no_deepspeed = "" if machine.deepspeed else "DeepSpeed is not installed"

    def row(name: str, title: str, peer: str, config: Mapping[str, Any], **more: Any) -> Row:
        settings = {"peer": peer, "config": dict(config)}
        if peer == "DeepSpeed":
            settings["requires"] = ["deepspeed"]
        return Row(name, title, "steps:ratio", more.pop("ranks", gpus), 180, settings, apart=True, **more)

    return [
        row("step/ddp", "a step beside DistributedDataParallel, float32", "DDP",
            {"zero_optimization": {"stage": 0}, "parallel": {"dp_replicate": gpus}}),
        *(
            row(f"step/fully_shard-{stage}", f"a step at ZeRO {stage} beside fully_shard, bfloat16", "fully_shard",
                {**REDUCED_FP32, "zero_optimization": {"stage": stage}, "parallel": shard})
            for stage in (2, 3)
        ),
        *(
            row(f"step/deepspeed-{stage}", f"a step at ZeRO {stage} beside DeepSpeed, bfloat16", "DeepSpeed",
                {**REDUCED_FP32, "zero_optimization": {"stage": stage}}, without=no_deepspeed)
            for stage in (1, 2, 3)
        ),
        row("offload/deepspeed", "a step with states in host memory beside DeepSpeed", "DeepSpeed",
            {**REDUCED_FP32, "zero_optimization": {"stage": 2, "offload_optimizer": _HOST}}, ranks=1, without=no_deepspeed),
    ]  # fmt: skip


def _overlap(gpus: int) -> list[Row]:
    offload = {**BF16, "parallel": {"activation_offload": {"fraction": 1.0}}}
    zero3 = {**BF16, "zero_optimization": {"stage": 3}, "parallel": {"dp_shard": gpus}}
    rows = (("copies", "copies of activations under computation", 1, offload, ""),
            ("collectives", "collectives of ZeRO 3 under computation", gpus, zero3, _needs_two(gpus)))  # fmt: skip
    return [
        Row(f"overlap/{kind}", title, "overlap:trace", ranks, 300, {"kind": kind, "config": config}, apart=True, without=without)
        for kind, title, ranks, config, without in rows
    ]


def _planned() -> list[Row]:
    layouts = {"tp": {"tp": 2, "pp": 1}, "pp": {"tp": 1, "pp": 2}}
    return [
        Row(
            f"planned/{name}",
            f"one rank of a planned layout of 8 GPUs ({name} 2) against the planner's time",
            "planned:rank_of_plan",
            1,
            240,
            {"fixed": fixed},
            apart=True,
        )
        for name, fixed in layouts.items()
    ]
