"""The layouts that the plan selects for published clusters, with a dry run of one rank."""

import time
from dataclasses import replace
from typing import Any

from plait.cli.planning.dry_run import dry_run
from plait.planner.explain import describe
from plait.planner.hardware import cluster
from plait.planner.models import DROPOUTS, Model, find_model
from plait.planner.output import config_of
from plait.planner.request import Request
from plait.planner.search import plan

TRIED = [
    # (model, gpu, gpus, samples, tokens of a sample)
    ("gpt3-175b", "a100", 1024, 1536, 2048),
    ("turing-nlg-530b", "a100", 2240, 1920, 2048),
    ("llama-2-70b", "a100", 1024, 1024, 4096),
    ("llama-3-405b", "h100", 16384, 2048, 8192),
]
"""Clusters of published runs. Llama-2 has its published batch of 4 Mi tokens (arXiv 2307.09288)."""


def _request(model: str, gpu: str, gpus: int, batch: int, sequence: int) -> Request:
    known = find_model(model, sequence=sequence)
    section = dict(known.section)
    architecture = known.architecture
    if section["config"]["model_type"] == "gpt2":
        # The kernels of the published runs keep no masks of attention in memory.
        dropouts = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
        section["config"] = section["config"] | dict.fromkeys(dropouts, 0.0)
        architecture = replace(architecture, **dict.fromkeys(DROPOUTS, 0))
    return Request(Model(architecture, section), cluster(gpu, gpus), batch, sequence)


def tried() -> list[dict[str, Any]]:
    """Return predicted and dry-run bytes of one rank per cluster."""
    rows = []
    for model, gpu, gpus, batch, sequence in TRIED:
        request = _request(model, gpu, gpus, batch, sequence)
        # A budget in bytes does not say how many blocks are recomputed, so nothing is predicted.
        best = next(choice for choice in plan(request, best=50).best if choice.budget is None)
        began = time.perf_counter()
        run = dry_run(request, config_of(request, best))
        predicted = run.predicted["peak"]
        row: dict[str, Any] = {"model": model, "gpus": gpus, "gpu": gpu}
        row["layout"] = describe(best.layout)
        row |= {"rank": run.rank, "stage": run.stage, "predicted": predicted}
        row |= {"dry_run": run.measured.peak, "ratio": predicted / run.measured.peak}
        row |= {"run": run.micro_batches_run, "accumulation": run.accumulation}
        row["seconds"] = time.perf_counter() - began
        print(row, flush=True)
        rows.append(row)
    return rows
