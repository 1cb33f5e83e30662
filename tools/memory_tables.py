"""Write the tables of docs/explanation/memory.md: the peak of a step and the activations of a
micro-batch, predicted and measured, and the time that recomputation takes.

    python -m tools.memory_tables
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from operator import truediv
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import plait
from benchmarks.common.report import ROOT, markdown, with_sections
from plait._torch.groups import delivered_at_once
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.config.resolving.resolve import load, resolve
from plait.dryrun.dry_model import MODES, ActivationTechniques, rank_activations, token_batch
from plait.dryrun.predicted_peak import predict_peak_on
from plait.engine.single_rank import predict_messages
from plait.model.blocks import find_blocks
from plait.parallel.accounting.activations import BlockMode
from plait.parallel.parts import Parts
from plait.parallel.techniques.recompute import Recompute
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.sizes import MIB
from tests.measured.memory import measure_activations, measure_peak

PAGE = ROOT / "docs" / "explanation" / "memory.md"
SAMPLES = 2
LENGTH = 128
_LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 32},
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 512},
}
PEAKS: list[tuple[str, dict[str, list[Any]]]] = [
    ("llama", {"stage": [0, 1, 2, 3], "bf16": [True], "count": [1, 2]}),
    ("llama", {"stage": [3], "mode": [*MODES]}),
    ("llama", {"stage": [3], "tp": [2], "bf16": [True]}),
    ("qwen3", {"stage": [0, 3], "mode": ["selective"]}),
    ("gpt2", {"stage": [0, 3], "tp": [1, 2], "mode": ["full"]}),
    ("llama", {"stage": [0, 3], "schedule": ["1f1b"], "count": [4]}),
    ("llama", {"stage": [2], "schedule": ["interleaved-1f1b"], "count": [4]}),
    ("llama", {"stage": [2], "schedule": ["zbv"], "mode": [*MODES], "count": [4]}),
]
"""Models, and values of which every combination is a row. `count` is the number of micro-batches.

A layout with a schedule has two pipeline stages.
"""
USUAL: dict[str, list[Any]] = {
    "stage": [0],
    "tp": [1],
    "schedule": [""],
    "mode": ["none"],
    "bf16": [False],
    "count": [1],
}


def model_of(kind: str, *, device: str = "meta", **fields: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"bos_token_id": 0, "eos_token_id": 0, **SHAPES[kind], **fields}
    config = AutoConfig.for_model(kind, vocab_size=1024, use_cache=False, **shape)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """Make this process the first rank of many, whose collectives move nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def activations() -> Iterator[list[str]]:
    """Yield rows: model, layout, mode, and bytes of blocks and of the head with the loss."""
    ids = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    layouts = {
        "1 process": {"tp": 1},
        "tp 2": {"tp": 2},
        "tp 2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    }
    for kind, (title, layout), mode in product(SHAPES, layouts.items(), MODES):
        is_sequence = "sequence_parallel" in layout
        if is_sequence and kind == "gpt2":
            continue
        parallel = {**layout, "recompute": {"mode": mode}}
        config = {"train_micro_batch_size_per_gpu": SAMPLES, "parallel": parallel}
        with fake_world(layout["tp"]):
            resolved = resolve(load(config), world_size=layout["tp"])
            model = model_of(kind)
            (rank,) = rank_activations(
                Parts(model, find_blocks(model)),
                mesh=build_mesh(resolved.layout),
                batch=token_batch(SAMPLES, LENGTH),
                techniques=ActivationTechniques(TensorParallel(sequence_parallel=is_sequence)),
            )
            (stage,) = rank.stages
            engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
            measured = measure_activations(engine, {"input_ids": ids, "labels": ids})
        modes = engine.parts.recompute_modes
        assert modes is not None
        blocks = stage.saved(modes)
        head = stage.modes["none"].head
        values = (blocks, measured["activations"], head, measured["logits"])
        yield [kind, title, mode, *map("{:,}".format, values)]


def peaks() -> Iterator[list[str]]:
    """Yield rows: model, layout, the peak of rank 0, predicted and measured, and its moment."""
    for kind, choices in PEAKS:
        for values in product(*(USUAL | choices).values()):
            yield peak_row(kind, *values)


def peak_row(
    kind: str, stage: int, tp: int, schedule: str, mode: str, bf16: bool, count: int
) -> list[str]:
    """Return the row of a layout. The arguments are the keys of `USUAL`."""
    pp = 1 + bool(schedule)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": count,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "parallel": {
            "tp": tp,
            "pp": pp,
            "recompute": {"mode": mode},
            "pipeline": {"schedule": schedule or "1f1b"},
        },
    }
    world = 2 * tp * pp
    resolved = resolve(load(config), world_size=world)
    model = model_of(kind)
    ids = torch.arange(SAMPLES * count * LENGTH).view(-1, LENGTH) % 1024
    batch = {"input_ids": ids, "labels": ids.clone()}
    with fake_world(world), delivered_at_once():
        mesh = build_mesh(resolved.layout)
        peak = predict_peak_on(mesh, model, resolved, samples=SAMPLES, length=LENGTH).peak
        engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
        pipeline = engine.sharded.pipeline
        if pipeline is not None:
            micro_batch = {name: tensor[:SAMPLES] for name, tensor in batch.items()}
            predict_messages(engine.model, engine.parts, pipeline, micro_batch)
        measured = measure_peak(engine, batch).torch_bytes
    techniques = {
        f"ZeRO {stage}": True,
        f"tp {tp}": tp > 1,
        f"pp 2, {schedule}": schedule,
        f"recompute {mode}": mode != "none",
        "bf16": bf16,
        "fp32": not bf16,
        "1 micro-batch": count == 1,
        f"{count} micro-batches": count > 1,
    }
    layout = ", ".join(name for name, is_used in techniques.items() if is_used)
    difference = f"{100 * (peak.peak_bytes / measured - 1):+.2f} %"
    return [kind, layout, f"{peak.peak_bytes:,}", f"{measured:,}", difference, peak.moment]


def times() -> Iterator[list[str]]:
    """Yield rows: mode, bytes that blocks keep, and operations and time as multiples."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1376}
    models: dict[BlockMode, nn.Module] = {}
    for mode in MODES:
        torch.manual_seed(0)
        model = model_of("llama", device="cpu", **sizes)
        parts = Parts(model=model, blocks=find_blocks(model))
        Recompute(mode=mode).apply(parts, build_mesh(Layout()))
        models[mode] = model
    plain = model_of("llama", **sizes)
    parts = Parts(plain, find_blocks(plain))
    batch = token_batch(2, 256)
    (rank,) = rank_activations(parts, mesh=build_mesh(Layout()), batch=batch)
    ids = torch.arange(512).view(2, 256)
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(-1, 9):  # the first turn is not counted
        for mode, model in models.items():
            began = time.perf_counter()
            plait.causal_lm_loss(model(input_ids=ids), {"labels": ids})[0].backward()
            if turn >= 0:
                seconds[mode].append(time.perf_counter() - began)
    predicted = rank.stages[0].modes
    for mode in MODES:
        ratio = statistics.median(map(truediv, seconds[mode], seconds["none"]))
        flops = predicted[mode].flops / predicted["none"].flops
        saved = sum(predicted[mode].saved) / MIB
        yield [mode, f"{saved:.1f} MiB", f"{flops:.3f}", f"{ratio:.2f}"]


def main() -> None:
    torch.set_num_threads(1)
    tables = {
        "peaks": (peaks, "model|layout (2 data-parallel ranks)|predicted|measured||timeline point"),
        "activations": (
            activations,
            "model|layout|recompute|blocks, predicted|measured|head and loss, predicted|measured",
        ),
        "times": (times, "recompute|blocks keep|operations|time"),
    }
    sections = {}
    for name, (rows, header) in tables.items():
        table = markdown(header.split("|"), [*rows()], right=())
        sections[f"tools/memory_tables.py: {name}"] = table
    PAGE.write_text(with_sections(PAGE, sections), encoding="utf-8")


if __name__ == "__main__":
    main()
