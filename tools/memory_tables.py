"""Write docs/explanation/memory.md: the peak of a step and what a micro-batch keeps, predicted and measured, and what recompute costs.

Run: python tools/memory_tables.py. Sizes are small so that the real runs fit anywhere; the last tables are predicted alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import plait
from plait._torch.groups import delivered_at_once
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.config.resolving.resolve import load, resolve
from plait.dryrun.dry_model import ActivationTechniques, rank_activations, token_batch
from plait.dryrun.predicted_peak import predict_peak, predict_peak_on
from plait.engine.single_rank import predict_messages
from plait.model.blocks import find_blocks
from plait.parallel.accounting.peak import PEAK_KINDS
from plait.parallel.parts import Parts, Plans
from plait.parallel.techniques.recompute import Recompute
from plait.parallel.techniques.tensor_parallel import TensorParallel
from plait.sizes import GIB, MIB
from tests.measured.memory import measure_activations, measure_in_flight, measure_peak

SAMPLES, LENGTH = 2, 128
MODES = ("none", "selective", "full")
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "qwen3": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 512},
}


def model_of(kind: str, *, device: str, **more: Any) -> nn.Module:
    """A causal language model without a cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        vocab_size=1024,
        use_cache=False,
        **{"bos_token_id": 0, "eos_token_id": 0, **SHAPES[kind], **more},
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


@contextmanager
def fake_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """This process as one rank of many, whose collectives move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def predicted_and_measured() -> Iterator[list[str]]:
    """Rows: the model, the layout, the mode, bytes of blocks and of head and loss, predicted and measured."""
    ids = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    for kind in SHAPES:
        for tp, sequence in ((1, False), (2, False), (2, True)):
            if sequence and kind == "gpt2":
                continue
            for mode in MODES:
                with fake_world(tp):
                    parallel = {
                        "tp": tp,
                        "sequence_parallel": sequence,
                        "recompute": {"mode": mode},
                    }
                    resolved = resolve(
                        load({"train_micro_batch_size_per_gpu": SAMPLES, "parallel": parallel}),
                        world_size=tp,
                    )
                    model = model_of(kind, device="meta")
                    split = TensorParallel(sequence_parallel=sequence)
                    (rank,) = rank_activations(
                        Parts(model, find_blocks(model)),
                        mesh=build_mesh(resolved.layout),
                        batch=token_batch(SAMPLES, LENGTH),
                        techniques=ActivationTechniques(split),
                    )
                    (facts,) = rank.stages
                    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
                    held = measure_activations(engine, {"input_ids": ids, "labels": ids})
                    modes = engine.parts.recompute_modes
                    layout = (
                        "1 process"
                        if tp == 1
                        else f"tp {tp}" + (", sequence parallel" if sequence else "")
                    )
                    figures = (
                        facts.saved(modes),
                        held["activations"],
                        facts.modes["none"].head,
                        held["logits"],
                    )
                    yield [kind, layout, mode, *(f"{figure:,}" for figure in figures)]


PEAKS: list[tuple[str, dict[str, Any]]] = [
    # model, and layout: ZeRO stage, tp, pp, recompute, bf16, micro-batches
    *(
        ("llama", {"stage": stage, "bf16": True, "count": count})
        for stage in (0, 1, 2, 3)
        for count in (1, 2)
    ),
    *(("llama", {"stage": 3, "mode": mode}) for mode in MODES),
    ("llama", {"stage": 3, "tp": 2, "bf16": True}),
    *(("qwen3", {"stage": stage, "mode": "selective"}) for stage in (0, 3)),
    *(("gpt2", {"stage": stage, "tp": tp, "mode": "full"}) for stage in (0, 3) for tp in (1, 2)),
    *(("llama", {"stage": stage, "pp": 2, "schedule": "1f1b", "count": 4}) for stage in (0, 3)),
    ("llama", {"stage": 2, "pp": 2, "schedule": "interleaved-1f1b", "count": 4}),
    *(
        ("llama", {"stage": 2, "pp": 2, "schedule": "zbv", "count": 4, "mode": mode})
        for mode in MODES
    ),
]
BUDGETS = ("1f1b", "interleaved-1f1b", "zbv")


def peaks() -> Iterator[list[str]]:
    """Rows: the model, the layout, the peak of rank 0, predicted and measured, and its moment."""
    for kind, chosen in PEAKS:
        stage, tp, pp, count = (
            chosen.get(name, default)
            for name, default in (("stage", 0), ("tp", 1), ("pp", 1), ("count", 1))
        )
        mode, bf16 = chosen.get("mode", "none"), chosen.get("bf16", False)
        parallel = {
            "tp": tp,
            "pp": pp,
            "recompute": {"mode": mode},
            "pipeline": {"schedule": chosen.get("schedule", "1f1b")},
        }
        file = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": count,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "parallel": parallel,
        }
        world = 2 * tp * pp
        resolved = resolve(load(file), world_size=world)
        model = model_of(kind, device="meta")
        ids = torch.arange(SAMPLES * count * LENGTH).view(-1, LENGTH) % 1024
        with fake_world(world), delivered_at_once():
            found = predict_peak_on(
                build_mesh(resolved.layout), model, resolved, samples=SAMPLES, length=LENGTH
            ).peak
            engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
            batch = {"input_ids": ids, "labels": ids.clone()}
            if engine.sharded.pipeline is not None:
                predict_messages(
                    engine.model,
                    engine.parts,
                    engine.sharded.pipeline,
                    {name: x[:SAMPLES] for name, x in batch.items()},
                )
            measured = measure_peak(engine, batch).torch_bytes
        words = [
            f"ZeRO {stage}",
            *([f"tp {tp}"] if tp > 1 else []),
            *([f"pp 2, {chosen['schedule']}"] if pp > 1 else []),
        ]
        words += [
            *([f"recompute {mode}"] if mode != "none" else []),
            "bf16" if bf16 else "fp32",
            "1 micro-batch" if count == 1 else f"{count} micro-batches",
        ]
        difference = f"{100 * (found.peak_bytes / measured - 1):+.2f} %"
        yield [
            kind,
            ", ".join(words),
            f"{found.peak_bytes:,}",
            f"{measured:,}",
            difference,
            found.moment,
        ]


def budgets() -> Iterator[list[str]]:
    """Rows: schedule and rank of a pipeline, what it holds without recompute and at least, what it chooses for a budget between the two,
    and what its micro-batches keep then at most, predicted and measured."""
    ids = torch.arange(SAMPLES * 4 * LENGTH).view(-1, LENGTH) % 1024
    for schedule in BUDGETS:
        for rank in (0, 1):
            file = {
                "train_micro_batch_size_per_gpu": SAMPLES,
                "gradient_accumulation_steps": 4,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "parallel": {"pp": 2, "pipeline": {"schedule": schedule}},
            }
            model = model_of("llama", device="meta")
            with fake_world(2, rank), delivered_at_once():
                resolved = resolve(load(file), world_size=2)
                pipeline = resolved.pipeline.check(
                    resolved.context(model=model, blocks=find_blocks(model))
                )
                assert pipeline is not None
                ranks = rank_activations(
                    Parts(model, find_blocks(model), Plans(pipeline=pipeline)),
                    mesh=build_mesh(resolved.layout),
                    batch=token_batch(SAMPLES, LENGTH),
                    techniques=ActivationTechniques(
                        resolved.tensor_parallel, recompute=resolved.recompute
                    ),
                )
                at = ranks[rank]
                plain, least = at.peak_bytes(("none",) * at.blocks), at.least()[0]
                budget = max((plain + least) // 2, *(one.least()[0] for one in ranks))
                file["parallel"]["recompute"] = {
                    "budget_gib": budget / GIB,
                    "sequence_length": LENGTH,
                }  # type: ignore[index]
                engine = plait.initialize(model, file, loss_fn=plait.causal_lm_loss)
                assert engine.sharded.pipeline is not None
                batch = {"input_ids": ids, "labels": ids.clone()}
                predict_messages(
                    engine.model,
                    engine.parts,
                    engine.sharded.pipeline,
                    {name: x[:SAMPLES] for name, x in batch.items()},
                )
                measured = max(held for _, held in measure_in_flight(engine, batch).after)
            modes = engine.parts.recompute_modes
            chosen = ", ".join(
                f"{modes.count(mode)} {mode}"
                for mode in ("full", "selective", "none")
                if mode in modes
            )
            held = max(held for _, held in at.held_after(modes))
            row = [plain, least, budget, at.peak_bytes(modes), held, measured]
            yield [
                schedule,
                str(rank),
                f"{at.most_in_flight():g}",
                *(f"{count:,}" for count in row[:3]),
                chosen,
                *(f"{x:,}" for x in row[3:]),
            ]


def large_peak() -> tuple[list[str], Iterator[list[str]]]:
    """Columns and rows: Llama-3.1-8B on 64 ranks, the peak of rank 0 by kind."""
    found = {}
    for name, more in {
        "ZeRO 3": {"zero_optimization": {"stage": 3}},
        "ZeRO 2, tp 8": {
            "zero_optimization": {"stage": 2},
            "parallel": {"tp": 8, "sequence_parallel": True},
        },
    }.items():
        for mode in ("none", "full"):
            parallel = {**more.get("parallel", {}), "recompute": {"mode": mode}}
            file = {
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                **more,
                "parallel": parallel,
            }
            resolved = resolve(load(file), world_size=64)
            found[f"{name}, recompute {mode}"] = predict_peak(
                llama_8b(), resolved, rank=0, samples=1, length=4096
            ).peak
    shown = list(found.values())
    rows = [
        [said, *(f"{peak.kinds[kind] / GIB:.2f}" for peak in shown)]
        for kind, said in PEAK_KINDS.items()
        if kind != "messages"
    ]
    rows.append(["**peak**", *(f"**{peak.peak_bytes / GIB:.2f}**" for peak in shown)])
    rows.append(["timeline point", *(peak.moment for peak in shown)])
    return ["GiB", *found], iter(rows)


def time_for_memory() -> Iterator[list[str]]:
    """Rows: the mode, what blocks keep, operations and seconds beside no recompute."""
    models: dict[str, nn.Module] = {}
    for mode in MODES:
        torch.manual_seed(0)
        model = model_of("llama", device="cpu", hidden_size=512, intermediate_size=1376)
        Recompute(mode=mode).apply(
            Parts(model=model, blocks=find_blocks(model)), build_mesh(Layout())
        )  # type: ignore[arg-type]
        models[mode] = model
    plain = model_of("llama", device="meta", hidden_size=512, intermediate_size=1376)
    (rank,) = rank_activations(
        Parts(plain, find_blocks(plain)), mesh=build_mesh(Layout()), batch=token_batch(2, 256)
    )
    facts = rank.stages[0].modes
    ids = torch.arange(512).view(2, 256)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(-1, 9):
        for mode, model in models.items():
            began = time.perf_counter()
            plait.causal_lm_loss(model(input_ids=ids), {"labels": ids})[0].backward()
            if turn >= 0:
                seconds[mode].append(time.perf_counter() - began)
    for mode in MODES:
        ratio = statistics.median(
            a / b for a, b in zip(seconds[mode], seconds["none"], strict=True)
        )
        found = facts[mode]  # type: ignore[index]
        yield [
            mode,
            f"{sum(found.saved) / MIB:.1f} MiB",
            f"{found.flops / facts['none'].flops:.3f}",
            f"{ratio:.2f}",
        ]


def llama_8b() -> nn.Module:
    """On meta, in float32."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def large() -> Iterator[list[str]]:
    """Rows: Llama-3.1-8B, one sequence of 4,096 tokens in bfloat16, a rank of tp 1 or 8."""
    for tp, sequence in ((1, False), (8, False), (8, True)):
        model = llama_8b()
        with fake_world(tp), torch.device("meta"):
            (one,) = rank_activations(
                Parts(model, find_blocks(model)),
                mesh=build_mesh(Layout(tp=tp)),
                batch=token_batch(1, 4096),
                techniques=ActivationTechniques(TensorParallel(sequence_parallel=sequence)),
                compute_dtype=torch.bfloat16,
            )
        (facts,) = one.stages
        layout = f"tp {tp}" + (", sequence parallel" if sequence else "")
        for mode in MODES:
            found = facts.modes[mode]  # type: ignore[index]
            shown = (sum(found.saved), found.head, facts.restored((mode,) * 32), found.peak)  # type: ignore[arg-type]
            yield [layout, mode, *(f"{figure / GIB:.2f}" for figure in shown)]


def table(columns: list[str], rows: Iterator[list[str]]) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Write the page."""
    torch.set_num_threads(1)
    first = table(
        [
            "model",
            "layout",
            "recompute",
            "blocks, predicted",
            "measured",
            "head and loss, predicted",
            "measured",
        ],
        predicted_and_measured(),
    )
    dist.is_initialized() and dist.destroy_process_group()
    second = table(["recompute", "blocks keep", "operations", "time"], time_for_memory())
    if dist.is_initialized():
        dist.destroy_process_group()
    third = table(
        [
            "layout",
            "recompute",
            "blocks",
            "head and loss",
            "recomputed block",
            "peak of forward and backward",
        ],
        large(),
    )
    fourth = table(
        [
            "model",
            "layout (2 data-parallel ranks)",
            "peak, predicted",
            "measured",
            "",
            "timeline point",
        ],
        peaks(),
    )
    fifth = table(*large_peak())
    columns = [
        "schedule",
        "rank",
        "in flight",
        "without recompute",
        "at least",
        "budget",
        "chosen",
        "of the budget",
        "kept, predicted",
        "measured",
    ]
    sixth = table(columns, budgets())
    page = f"""# Memory of a step

`plait layout FILE --peak` predicts the memory that a rank needs for a training step, without a device. It prints the
peak by kind of tensor, and the point of the step at which it occurs. This page compares predictions with measurements.

These are not modelled yet, and are refused: compiled blocks, offload, compressed communication, expert parallelism, a
secondary partition (hpZ), and an all-reduce algorithm that the file selects.

Written by `python tools/memory_tables.py`; do not edit. torch {torch.__version__}, CPU operators.

## Model states

The states of Llama-3.1-8B per rank for every ZeRO stage, from the ledger (`python -m tools.figures zero_memory`):

![model states per rank](../figures/zero_memory.svg)

## The peak of a step

The table shows the peak of allocated bytes on rank 0 during a step, with micro-batches of {SAMPLES} x {LENGTH} tokens. The bytes
are those of states, gathered parameters, unsharded gradients, buffers of collectives, activations in flight,
temporaries and the batch.

- Predicted: from one micro-batch on fake tensors, and the account of the layout.
- Measured: by torch's `MemTracker` around the second step of the engine, on a fake process group, which sends nothing
  but allocates everything.

Both count storages. Rounding and fragmentation of the allocator come on top.

{fourth}

The prediction for Llama-3.1-8B on 64 ranks, one sequence of 4,096 tokens in bfloat16, rank 0, CPU operators:

{fifth}

## Activations of a micro-batch

The table shows the bytes that one micro-batch of {SAMPLES} x {LENGTH} tokens saves for its backward on rank 0, in float32. They are
predicted by a run on fake tensors before the model is sharded, and measured as the storages that are still allocated
after a real forward.

{first}

## A budget in a pipeline

`parallel.recompute.budget_gib` limits the bytes of activations in a process, including the recomputed tensors of one
block during its backward. A pipeline rank holds several micro-batches, as many as the schedule and its position
require.

- Each rank selects its own recomputation modes. A rank with fewer micro-batches in flight recomputes less, which delays
  no other rank.
- All ranks know the selection of all ranks. A budget that one of them exceeds is refused on all, with the numbers.

The table shows a Llama of 4 blocks on two ranks, with 4 micro-batches of {SAMPLES} x {LENGTH} tokens, in float32. The budget is
half-way between no recomputation and the minimum. `kept` is the maximum over a step of the bytes of all micro-batches
in flight at the end of a computation.

{sixth}

Schedules that split the backward (`zbv`, `interleaved-zero-bubble`, `dualpipev`) recompute a block twice: once for the
gradients of inputs, and once for those of weights. Between the two, a micro-batch keeps the inputs of the second half.
During the second half all blocks of the stage are recomputed together. Recomputation therefore saves less than with
other schedules. The budget includes both. `plait plan` proposes no recomputation with them.

## Time for memory

Forward and backward of a Llama of 4 layers and width 512, with 2 x 256 tokens, on one thread. Operations and time are
relative to no recomputation. The time is the median of 9 interleaved rounds.

{second}

## Llama-3.1-8B

The prediction in GiB for one sequence of 4,096 tokens in bfloat16 on a rank. The composite CPU operators save more than
the fused ones of a GPU, because norms keep float32 copies. The peak contains everything except parameters and their
accumulated gradients.

{third}
"""
    (Path(__file__).parents[1] / "docs" / "explanation" / "memory.md").write_text(page)


if __name__ == "__main__":
    main()
