"""Write docs/memory.md: what a micro-batch keeps, foretold by the dry run and measured on the real model, and what recompute costs.

Run: python tools/activation_table.py. Sizes are small so that the real runs fit anywhere; the last table is foretold alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import plait
from plait.cluster.layout import Layout
from plait.cluster.mesh import build_mesh
from plait.config.resolve import load, resolve
from plait.engine.dryrun import activation_facts, token_batch
from plait.model.blocks import find_blocks
from plait.parallel.recompute import Recompute
from plait.parallel.technique import Parts
from plait.parallel.tensor import TensorParallel
from plait.units import GIB, MIB
from plait.verify.memory import measure_activations

SAMPLES, LENGTH = 2, 128
MODES = ("none", "selective", "full")
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
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

    config = AutoConfig.for_model(kind, vocab_size=1024, use_cache=False, **{"bos_token_id": 0, "eos_token_id": 0, **SHAPES[kind], **more})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """This process as rank 0 of many, whose collectives move nothing."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def foretold_and_measured() -> Iterator[list[str]]:
    """Rows: the model, the layout, the mode, bytes of blocks and of head and loss, foretold and measured."""
    ids = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    for kind in SHAPES:
        for tp, sequence in ((1, False), (2, False), (2, True)):
            if sequence and kind == "gpt2":
                continue
            for mode in MODES:
                with fake_world(tp):
                    parallel = {"tp": tp, "sequence_parallel": sequence, "recompute": {"mode": mode}}
                    resolved = resolve(load({"train_micro_batch_size_per_gpu": SAMPLES, "parallel": parallel}), world_size=tp)
                    model = model_of(kind, device="meta")
                    split = TensorParallel(sequence_parallel=sequence)
                    facts = activation_facts(
                        model,
                        blocks=find_blocks(model),
                        mesh=build_mesh(resolved.layout),
                        batch=token_batch(SAMPLES, LENGTH),
                        tensor_parallel=split,
                    )
                    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
                    held = measure_activations(engine, {"input_ids": ids, "labels": ids})
                    modes = engine.parts.block_modes
                    layout = "1 process" if tp == 1 else f"tp {tp}" + (", sequence parallel" if sequence else "")
                    figures = (facts.kept(modes), held["activations"], facts.modes["none"].logits, held["logits"])
                    yield [kind, layout, mode, *(f"{figure:,}" for figure in figures)]


def time_for_memory() -> Iterator[list[str]]:
    """Rows: the mode, what blocks keep, operations and seconds beside no recompute."""
    models: dict[str, nn.Module] = {}
    for mode in MODES:
        torch.manual_seed(0)
        model = model_of("llama", device="cpu", hidden_size=512, intermediate_size=1376)
        Recompute(mode=mode).apply(Parts(model=model, blocks=find_blocks(model)), build_mesh(Layout()))  # type: ignore[arg-type]
        models[mode] = model
    plain = model_of("llama", device="meta", hidden_size=512, intermediate_size=1376)
    facts = activation_facts(plain, blocks=find_blocks(plain), mesh=build_mesh(Layout()), batch=token_batch(2, 256)).modes
    ids = torch.arange(512).view(2, 256)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(-1, 9):
        for mode, model in models.items():
            began = time.perf_counter()
            plait.causal_lm_loss(model(input_ids=ids), {"labels": ids})[0].backward()
            if turn >= 0:
                seconds[mode].append(time.perf_counter() - began)
    for mode in MODES:
        ratio = statistics.median(a / b for a, b in zip(seconds[mode], seconds["none"], strict=True))
        found = facts[mode]  # type: ignore[index]
        yield [mode, f"{sum(found.blocks) / MIB:.1f} MiB", f"{found.flops / facts['none'].flops:.3f}", f"{ratio:.2f}"]


def large() -> Iterator[list[str]]:
    """Rows: Llama-3.1-8B, one sequence of 4,096 tokens in bfloat16, a rank of tp 1 or 8."""
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
    for tp, sequence in ((1, False), (8, False), (8, True)):
        with fake_world(tp), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            facts = activation_facts(
                model,
                blocks=find_blocks(model),
                mesh=build_mesh(Layout(tp=tp)),
                batch=token_batch(1, 4096),
                tensor_parallel=TensorParallel(sequence_parallel=sequence),
                compute_dtype=torch.bfloat16,
            )
        layout = f"tp {tp}" + (", sequence parallel" if sequence else "")
        for mode in MODES:
            found = facts.modes[mode]  # type: ignore[index]
            shown = (sum(found.blocks), found.logits, facts.returning((mode,) * 32), found.peak)  # type: ignore[arg-type]
            yield [layout, mode, *(f"{figure / GIB:.2f}" for figure in shown)]


def table(columns: list[str], rows: Iterator[list[str]]) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Write the page."""
    torch.set_num_threads(1)
    first = table(
        ["model", "layout", "recompute", "blocks, foretold", "measured", "head and loss, foretold", "measured"], foretold_and_measured()
    )
    dist.is_initialized() and dist.destroy_process_group()
    second = table(["recompute", "blocks keep", "operations", "time"], time_for_memory())
    if dist.is_initialized():
        dist.destroy_process_group()
    third = table(["layout", "recompute", "blocks", "head and loss", "one block comes back", "peak of forward and backward"], large())
    page = f"""# Memory of activations

Written by `python tools/activation_table.py`; do not edit. torch {torch.__version__}, operators of CPUs.

## Foretold and measured

Bytes that one micro-batch of {SAMPLES} x {LENGTH} tokens keeps for its backward on rank 0, float32: foretold by a run on fake tensors
before the model is sharded, and measured as the storages that are alive after a real forward.

{first}

## Time for memory

Forward and backward of a Llama of 4 layers and width 512, 2 x 256 tokens, one thread. Operations and time are those beside no recompute;
the time is the median of 9 interleaved rounds.

{second}

## Llama-3.1-8B

GiB for one sequence of 4,096 tokens in bfloat16 on a rank, foretold. The composite operators of CPUs save more than a GPU's fused ones:
norms keep float32 copies. `peak` has everything but parameters and their accumulated gradients.

{third}
"""
    (Path(__file__).parents[1] / "docs" / "memory.md").write_text(page)


if __name__ == "__main__":
    main()
