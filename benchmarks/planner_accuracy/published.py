"""Layouts that experts trained with, beside the plan for the same model and cluster.

Two questions. Is the published time within the interval that is predicted for that layout, by the framework that ran it, with constants
that were learned without its source? And what does the plan choose instead, for Plait's own kernels, and which term of the step decides?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.planner_accuracy.frameworks import knowledge, read_runs
from benchmarks.planner_accuracy.held_out import left_out
from benchmarks.planner_accuracy.learn import rows_of
from benchmarks.planner_accuracy.predict import evaluate
from benchmarks.planner_accuracy.row import Row
from plait.planner.explain import describe
from plait.planner.hardware import cluster
from plait.planner.job import Layouts
from plait.planner.models import find_model
from plait.planner.request import Request
from plait.planner.search import plan, price
from plait.planner.step_time import STEP_TERMS
from plait.sizes import GIB

_MEGATRON = {
    "gated_mlp": "n",
    "n_kv_heads": "",
    "vocab": "51200",
    "moe": "",
    "tied_emb": "y",
    "gpu": "A100-80GB-SXM",
    "gpus_per_node": "8",
}
_LLAMA3_405B = {
    "n_layers": "126",
    "hidden": "16384",
    "n_heads": "128",
    "n_kv_heads": "8",
    "ffn_hidden": "53248",
    "vocab": "128256",
    "gated_mlp": "y",
    "tied_emb": "n",
    "moe": "",
    "gpu": "H100-80GB-SXM",
    "gpus_per_node": "8",
    "precision": "bf16",
    "micro_batch": "1",
    "tp": "8",
    "sp": "y",
    "pp": "16",
    "vpp": "8",
    "zero_or_fsdp": "ZeRO-1",
    "recompute": "none",
    "framework": "Llama 3's own",
}
_NVIDIA = {
    "n_heads": "64",
    "n_kv_heads": "8",
    "n_layers": "80",
    "hidden": "8192",
    "gated_mlp": "y",
    "tied_emb": "n",
    "moe": "",
    "gpu": "H100-80GB-SXM",
    "gpus_total": "512",
    "gpus_per_node": "8",
    "precision": "bf16",
    "micro_batch": "1",
    "zero_or_fsdp": "ZeRO-1",
    "recompute": "none",
    "framework": "NeMo 24.09 (Megatron-Core)",
}


@dataclass(frozen=True)
class Published:
    """A run that a source prints: a row of `data/runs.csv` or of a set, or its columns. Without a time where a source prints a layout,
    but no run of it."""

    model: str
    gpu: str
    row: str | Mapping[str, str]
    source: str
    tflops: float | None = None
    """Of a GPU, where the source prints that and no seconds."""


PUBLISHED = (
    Published(
        "llama-3-8b",
        "h100-hbm2e",
        "TITANLOG-0002",
        "torchtitan's log in torchao's tutorial, H100 of 500 W",
    ),
    Published(
        "llama-3-8b",
        "h100",
        {
            **_NVIDIA,
            "n_layers": "32",
            "hidden": "4096",
            "n_heads": "32",
            "ffn_hidden": "14336",
            "vocab": "128256",
            "seq_len": "8192",
            "global_batch": "8192",
            "tp": "1",
            "sp": "n",
            "pp": "1",
            "vpp": "1",
            "cp": "2",
            "dp": "256",
        },
        "NVIDIA's recipe for 8 to 128 GPUs (DGX Cloud benchmarks), continued to 512",
    ),
    Published("llama-3-70b", "h100", "NEMO2407-0012", "NeMo 24.07 performance summary, float8"),
    Published("llama-3-70b", "h100", "DGXC-0006", "NVIDIA's DGX Cloud benchmarks, NeMo 24.09"),
    Published("llama-2-70b", "a100", "XTUNER-0012", "XTuner's benchmark of long sequences"),
    Published(
        "qwen2.5-72b",
        "h100",
        {
            **_NVIDIA,
            "ffn_hidden": "29568",
            "vocab": "152064",
            "seq_len": "131072",
            "global_batch": "256",
            "tp": "8",
            "sp": "y",
            "pp": "4",
            "vpp": "5",
            "cp": "16",
            "dp": "1",
        },
        "NeMo's recipe llama3_70b_64k, twice as long over twice as many GPUs",
    ),
    Published("llama-3-405b", "h100", "MBRIDGE-0064", "Megatron-Bridge 26.04 recipes, float8"),
    Published(
        "llama-3-405b",
        "h100",
        {
            **_LLAMA3_405B,
            "gpus_total": "8192",
            "seq_len": "8192",
            "global_batch": "2048",
            "cp": "1",
            "dp": "64",
        },
        "arXiv 2407.21783 table 4",
        430.0,
    ),
    Published(
        "llama-3-405b",
        "h100",
        {
            **_LLAMA3_405B,
            "gpus_total": "16384",
            "seq_len": "8192",
            "global_batch": "2048",
            "cp": "1",
            "dp": "128",
        },
        "arXiv 2407.21783 table 4",
        400.0,
    ),
    Published(
        "llama-3-405b",
        "h100",
        {
            **_LLAMA3_405B,
            "gpus_total": "16384",
            "seq_len": "131072",
            "global_batch": "128",
            "cp": "16",
            "dp": "8",
        },
        "arXiv 2407.21783 table 4",
        380.0,
    ),
    Published(
        "gpt3-175b",
        "a100",
        {
            **_MEGATRON,
            "n_layers": "96",
            "hidden": "12288",
            "n_heads": "96",
            "ffn_hidden": "49152",
            "gpus_total": "1024",
            "precision": "fp16",
            "seq_len": "2048",
            "global_batch": "1536",
            "micro_batch": "1",
            "tp": "8",
            "sp": "n",
            "pp": "16",
            "vpp": "1",
            "cp": "1",
            "dp": "8",
            "zero_or_fsdp": "none",
            "recompute": "full",
            "framework": "Megatron-LM",
            "step_time_s": "32.0",
        },
        "NVIDIA/Megatron-LM README: about 32 s",
    ),
    Published(
        "gpt3-13b",
        "v100-32gb",
        {
            **_MEGATRON,
            "gpu": "V100-32GB-SXM2",
            "n_layers": "40",
            "hidden": "5120",
            "n_heads": "40",
            "ffn_hidden": "20480",
            "gpus_total": "8",
            "precision": "fp16",
            "seq_len": "2048",
            "global_batch": "512",
            "micro_batch": "4",
            "tp": "1",
            "sp": "n",
            "pp": "1",
            "vpp": "1",
            "cp": "1",
            "dp": "8",
            "zero_or_fsdp": "ZeRO-3 + CPU offload of the optimizer",
            "recompute": "full",
            "framework": "DeepSpeed",
        },
        "DeepSpeed's ZeRO-3 Offload, which trained 13B and more on V100",
    ),
    Published(
        "turing-nlg-530b",
        "a100",
        {
            **_MEGATRON,
            "n_layers": "105",
            "hidden": "20480",
            "n_heads": "128",
            "ffn_hidden": "81920",
            "gpus_total": "2240",
            "precision": "bf16",
            "seq_len": "2048",
            "global_batch": "1920",
            "micro_batch": "1",
            "tp": "8",
            "sp": "n",
            "pp": "35",
            "vpp": "1",
            "cp": "1",
            "dp": "8",
            "zero_or_fsdp": "none",
            "recompute": "full",
            "framework": "Megatron-DeepSpeed",
            "step_time_s": "60.1",
        },
        "arXiv 2201.11990, 280 DGX A100",
    ),
)


def rows() -> list[dict[str, Any]]:
    """Every published layout beside the plan."""
    table = {row["id"]: row for row in rows_of("runs", "unseen_2")}
    return [
        _beside(one, table[one.row] if isinstance(one.row, str) else dict(one.row))
        for one in PUBLISHED
    ]


def _beside(one: Published, row: Row) -> dict[str, Any]:
    gpus, batch, sequence = (int(row[name]) for name in ("gpus_total", "global_batch", "seq_len"))
    model = find_model(one.model, sequence=sequence)
    flops = float(model.architecture.model_flops(sequence)) * batch * sequence
    if one.tflops is not None:
        row = {**row, "step_time_s": f"{flops / gpus / one.tflops / 1e12:.3f}"}
    # A row of the table is predicted without its source; the others are of sources that no constant was learned from.
    found = (
        left_out([row], calibrated=False) if row.get("id") else evaluate([row], known=knowledge())
    )
    (predicted,) = found.predictions
    layout = Layouts.of([read_runs([row]).variants[0].layout]).at(0)
    precision = "fp16" if row["precision"] == "fp16" else "bf16"
    request = Request(model, cluster(one.gpu, gpus), batch, sequence, precision)
    (theirs,) = price(request, [layout])
    ours = plan(request, best=1).best[0]
    faster = float(np.sign(theirs.seconds - ours.seconds))
    saved = {name: (theirs.terms[name] - ours.terms[name]) * faster for name in STEP_TERMS}
    reasons = sorted(
        (name for name in STEP_TERMS if saved[name] > 0), key=lambda name: -saved[name]
    )
    reasons = [name for name in reasons if saved[name] >= saved[reasons[0]] / 4][:3]
    measured = predicted.measured_seconds
    return {
        "model": one.model,
        "gpus": gpus,
        "gpu": one.gpu,
        "sequence": sequence,
        "source": one.source,
        "published": describe(layout),
        "measured_seconds": measured,
        "predicted_seconds": predicted.seconds,
        "low_90": predicted.seconds_low,
        "high_90": predicted.seconds_high,
        "inside": None
        if measured is None
        else predicted.seconds_low <= measured <= predicted.seconds_high,
        "plan": describe(ours.layout),
        "plan_seconds": ours.seconds,
        "theirs_seconds": theirs.seconds,
        "theirs_gib": theirs.needed / GIB,
        "theirs_fits": theirs.fit_probability,
        "reasons": {STEP_TERMS[name]: saved[name] * faster for name in reasons},
    }
