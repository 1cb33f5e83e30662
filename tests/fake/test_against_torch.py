"""A Llama block under tensor parallelism next to the same block split by hand with torch's own styles: collectives, bytes and operators (level L1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.parity.test_tensor_parallel import settings
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import plait
from plait.verify.traffic import count_traffic

LENGTH, WIDTH = 8, 32


class Operators(TorchDispatchMode):
    """Counts what reaches the dispatcher on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def llama(device: str) -> nn.Module:
    """Widths that 2 divides: torch's own styles cannot split others."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    with torch.device(device):
        return AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=WIDTH, intermediate_size=64, **sizes))


def by_hand(model: nn.Module, *, sequence: bool) -> None:
    """What torch's tutorials do for one decoder layer."""
    hidden = "hidden_states"
    shards = Shard(1) if sequence else Replicate()
    door = PrepareModuleInput(input_kwarg_layouts={hidden: shards}, desired_input_kwarg_layouts={hidden: Replicate()})
    plan: dict[str, Any] = {
        "self_attn": door,
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=shards),
        "mlp": PrepareModuleInput(input_layouts=(shards,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=shards),
    }
    if sequence:
        plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
    parallelize_module(model.model.layers[0], init_device_mesh("cpu", (2,)), plan)  # type: ignore[union-attr, index, arg-type]


def block_of(model: nn.Module, *, sequence: bool) -> tuple[dict[str, int], dict[str, int], Counter[str]]:
    """(calls, bytes, operators) of one forward and backward of the first block."""
    block = model.model.layers[0]  # type: ignore[union-attr, index]
    block._forward_pre_hooks.clear()  # type: ignore[union-attr]  # the door of the first block belongs to the model, not to a block
    rotary = model.model.rotary_emb  # type: ignore[union-attr]
    hidden = torch.randn(2, LENGTH // 2 if sequence else LENGTH, WIDTH, requires_grad=True)
    positions = rotary(torch.randn(2, LENGTH, WIDTH), torch.arange(LENGTH)[None])  # type: ignore[operator]
    for _ in range(2):  # DTensor's caches are warm in the second
        with count_traffic() as traffic, Operators() as operators:
            output = block(hidden, position_embeddings=positions)  # type: ignore[operator]
            output.sum().backward()
    calls = Counter(call.kind for call in traffic.calls)
    return dict(calls), traffic.bytes(), operators.counts


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_no_more_than_by_hand(fake_world: Callable[..., None], sequence: bool) -> None:
    """The same collectives and bytes, and no more operators."""
    fake_world(2)
    ours = llama("meta")
    engine = plait.initialize(ours, settings(2, 2, 0, 1, 1, sequence))
    if engine.parts.tensor_region is not None:
        engine.parts.tensor_region.length = LENGTH
    theirs = llama("cpu")
    by_hand(theirs, sequence=sequence)
    our_calls, our_bytes, our_operators = block_of(ours, sequence=sequence)
    their_calls, their_bytes, their_operators = block_of(theirs, sequence=sequence)
    data = ("all_gather", "reduce_scatter") if sequence else ("all_reduce",)
    for kind in data:
        assert our_calls[kind] <= their_calls[kind], (our_calls, their_calls)
        assert our_bytes[kind] <= their_bytes[kind], (our_bytes, their_bytes)
    assert our_operators.total() <= their_operators.total(), (our_operators - their_operators, their_operators - our_operators)
