"""Activations: what a dry run on fake tensors foretells is what a real micro-batch keeps, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import plait
from plait.cluster.mesh import build_mesh
from plait.config.resolving.resolve import load, resolve
from plait.dryrun.dry_model import ActivationTechniques, rank_activations, token_batch
from plait.losses.chunked_loss import ChunkedCausalLMLoss, deferred
from plait.model.blocks import find_blocks
from plait.model.facts import model_facts
from plait.model.plans import make_plan
from plait.parallel.accounting.activations import RankActivations
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.micro_batches import default_forward
from plait.parallel.order import account_all
from plait.parallel.parts import Parts
from tests.fake.worlds import FakeWorld
from tests.measured.memory import measure_activations
from tests.measured.traffic import count_traffic
from tests.parity import cases
from tests.parity.tensor_parallel import settings

SAMPLES, LENGTH = 2, 8
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"mode": "full"},
    "half": {"mode": "full", "every": 2},
    "selective": {"mode": "selective"},
    "sliced": {"mode": "full", "partition": True},
}


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH) % cases.VOCABULARY
    return {"input_ids": ids, "labels": ids}


def foretold(
    kind: str, config: dict[str, Any], dtype: torch.dtype
) -> tuple[Any, Any, RankActivations, Ledger]:
    """(model, resolved, facts, ledger) before anything is applied."""
    world = (
        config["parallel"]["tp"]
        * config["parallel"]["dp_replicate"]
        * config["parallel"]["dp_shard"]
    )
    resolved = resolve(load(config), world_size=world)
    model = cases.build(kind, tied=False, dtype=dtype)
    chunk = resolved.loss_chunk_tokens
    blocks = find_blocks(model)
    compute = {None: None, "bfloat16": torch.bfloat16, "float16": torch.float16}[
        resolved.precision.compute
    ]
    (measured,) = rank_activations(
        Parts(model, blocks),
        mesh=build_mesh(resolved.layout),
        batch=token_batch(SAMPLES, LENGTH),
        techniques=ActivationTechniques.of(resolved),
        compute_dtype=compute,
        **(
            {
                "loss_fn": ChunkedCausalLMLoss(chunk_tokens=chunk),
                "forward": deferred(default_forward, model),
            }
            if chunk
            else {}
        ),
    )
    at = resolved.layout
    plan = make_plan(model, tp=at.tp, blocks=blocks) if at.tp > 1 else None
    start = Ledger.of_rank(at, accumulation=1, tokens=SAMPLES * LENGTH, activations=measured)
    techniques = resolved.techniques
    return (
        model,
        resolved,
        measured,
        account_all(techniques, start, model_facts(model, blocks, tensor_plan=plan)),
    )


CASES = [
    # kind, tp, sequence parallel, ZeRO stage, recompute, compute dtype
    ("llama", 1, False, 0, "none", None),
    ("llama", 1, False, 3, "full", "bf16"),
    ("llama", 2, False, 0, "selective", None),
    ("llama", 2, True, 1, "selective", "bf16"),
    ("llama", 2, True, 3, "half", None),
    ("gpt2", 1, False, 0, "selective", None),
    ("gpt2", 1, False, 2, "none", "bf16"),
    ("gpt2", 2, False, 3, "full", None),
    ("gpt2", 2, False, 1, "half", "bf16"),
    ("gpt2", 2, False, 1, "sliced", None),
    ("qwen3", 1, False, 2, "half", None),
    ("qwen3", 2, False, 0, "none", None),
    ("qwen3", 2, False, 2, "selective", "bf16"),
    ("qwen3", 2, True, 3, "full", "bf16"),
    ("qwen3", 2, True, 1, "none", None),
]
WHOLE = [
    (kind, tp, sequence, stage, mode, dtype)
    for kind in ("llama", "gpt2", "qwen3")
    for tp, sequence in ((1, False), (2, False), (2, True))
    for stage in (0, 1, 2, 3)
    for mode in RECOMPUTE
    for dtype in (None, "bf16")
    if not (kind == "gpt2" and sequence)
    and not (dtype and stage == 0)
    and not (mode == "sliced" and (tp == 1 or sequence))
]


@pytest.mark.parametrize(("kind", "tp", "sequence", "stage", "mode", "dtype"), CASES)
def test_foretold_is_measured(
    fake_world: FakeWorld,
    kind: str,
    tp: int,
    sequence: bool,
    stage: int,
    mode: str,
    dtype: str | None,
) -> None:
    """A cover of the matrix."""
    check(fake_world, kind, tp, sequence, stage, mode, dtype)


@pytest.mark.proof
@pytest.mark.parametrize(("kind", "tp", "sequence", "stage", "mode", "dtype"), WHOLE)
def test_foretold_is_measured_everywhere(
    fake_world: FakeWorld,
    kind: str,
    tp: int,
    sequence: bool,
    stage: int,
    mode: str,
    dtype: str | None,
) -> None:
    """The matrix."""
    check(fake_world, kind, tp, sequence, stage, mode, dtype)


@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_with_the_loss_in_pieces(fake_world: FakeWorld, tp: int, loss_parallel: bool) -> None:
    """The head's input takes the place of the logits; the loss's collectives go out twice."""
    check(
        fake_world,
        "llama",
        tp,
        tp == 2 and loss_parallel,
        3,
        "selective",
        None,
        loss_chunk_tokens=6,
        loss_parallel=loss_parallel,
    )


@pytest.mark.parametrize(
    ("tp", "sequence", "mode", "dtype"),
    [
        (1, False, "none", "bf16"),
        (1, False, "half", None),
        (2, True, "none", None),
        (2, False, "full", None),
    ],
)
def test_with_the_mlp_in_tiles(
    fake_world: FakeWorld, tp: int, sequence: bool, mode: str, dtype: str | None
) -> None:
    """What is wide is not kept, and nothing is sent again."""
    check(fake_world, "llama", tp, sequence, 3, mode, dtype, mlp_tile_tokens=6)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_a_tile_keeps_nothing_wide(fake_world: FakeWorld, mode: str) -> None:
    """Not the results of operators either that are kept of the rest of a block."""
    fake_world(1)
    kept = []
    for tokens in (0, 4):
        config = settings(
            1,
            1,
            0,
            1,
            1,
            False,
            recompute=RECOMPUTE[mode] | ({"keep": ["matmul"]} if mode == "selective" else {}),
        )
        config["parallel"]["mlp_tile_tokens"] = tokens
        kept.append(int(foretold("llama", config, torch.float32)[3].memory["activations"][0]))
    model = cases.build("llama", tied=False)
    wide = 2 * SAMPLES * LENGTH * model.config.intermediate_size * 4  # gate and up of a block
    assert kept[0] - kept[1] >= model.config.num_hidden_layers * wide


def check(
    fake_world: FakeWorld,
    kind: str,
    tp: int,
    sequence: bool,
    stage: int,
    mode: str,
    dtype: str | None,
    **more: Any,
) -> None:
    """Blocks, head and loss; and the traffic that recomputation repeats."""
    fake_world(2 * tp)
    recompute = dict(RECOMPUTE[mode])
    partition = recompute.pop("partition", False)
    config = settings(2 * tp, tp, stage, 1, 1, sequence, recompute=recompute, **more)
    config |= {
        "bf16": {"enabled": dtype == "bf16"},
        "activation_checkpointing": {"partition_activations": partition},
    }
    model, resolved, _, ledger = foretold(kind, config, torch.float32)
    engine = plait.initialize(model, resolved, loss_fn=plait.causal_lm_loss)
    held = measure_activations(engine, batch())
    assert {name: held[name] for name in ("activations", "logits")} == {
        name: int(ledger.memory[name][0]) for name in ("activations", "logits")
    }
    with count_traffic() as traffic:
        engine.train_batch(batch())
    sent = {name: count for name, count in traffic.bytes().items() if name != "control"}
    assert sent == {name: int(count[0]) for name, count in ledger.traffic.items() if count[0]}
