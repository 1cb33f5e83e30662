"""A canonical call: what it is refused for, before it begins and where the model has run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch

from plait.checkpoint.agreement import together
from plait.errors import InputError
from plait.inference.canonical.arithmetic import Arithmetic
from plait.inference.canonical.batched import MOST_KEYS
from plait.inference.canonical.self_test import Broken, self_test
from plait.inference.predictor import Predictor
from plait.inference.quantised import SCALES
from plait.inference.rope_by_length import refuse_past, rope_by_length
from plait.inference.streamed import Streaming
from plait.model.adapters import adapted_layers
from plait.model.experts import find_experts
from plait.sharded.model import ShardedModel
from plait.units import dtype_of

_OTHERWISE = "use canonical=False; the probabilities that the trainer itself gives to tokens come from engine.score(sequences)"

_OTHER_ATTENTION = ', but with scaled_dot_product_attention (model.set_attn_implementation("sdpa"))'


def check(sharded: ShardedModel, *, longest: int) -> bytes:
    """What the self-test hashed, to be compared with other ranks'; 32 bytes a dtype. `longest`: tokens of a sequence. Raises InputError for
    what canonical arithmetic is not proven with, and where this machine does not compute as it needs."""
    if sharded.device.type != "cpu":
        raise InputError(
            f"canonical=True has been compared on CPUs only, and no kernels for {sharded.device.type} here are known to give a row the "
            f"same bits in every batch; {_OTHERWISE}"
        )
    for what in _not_proven(sharded):
        raise InputError(f"canonical=True is not proven with {what}; {_OTHERWISE}")
    refuse_past(rope_by_length(sharded.model), longest, "canonical=True", f"shorten it, or {_OTHERWISE}")
    if longest > MOST_KEYS:
        raise InputError(
            f"canonical=True adds up to {MOST_KEYS:,} keys without rounding, and a sequence may have {longest:,}; {_OTHERWISE}"
        )
    try:
        return self_test(_dtype(sharded))
    except Broken as broken:
        raise InputError(f"canonical=True: this machine does not keep the promise: {broken}; {_OTHERWISE}") from None


def compare(hashes: Sequence[bytes]) -> None:
    """Raise InputError where the self-tests of ranks gave other numbers. `hashes` by rank."""
    others = [rank for rank, one in enumerate(hashes) if one != hashes[0]]
    if others:
        raise InputError(
            f"canonical=True: ranks 0 and {others[0]} computed different bits from the same numbers (other processors or libraries); "
            f"{_OTHERWISE}"
        )


def run(predictor: Predictor, work: Iterator[None], *, apart: bool, arithmetic: Arithmetic | None) -> None:
    """`predictor.run`, in a canonical call behind a forward that shows which operators the model uses. Collective over all ranks then."""
    if arithmetic is None:
        predictor.run(work, apart=apart)
        return
    _agreed(arithmetic, predictor.device, predictor.idle)
    _agreed(arithmetic, predictor.device, partial(predictor.run, work, apart=apart))


def _agreed(arithmetic: Arithmetic, device: torch.device, work: Callable[[], None]) -> None:
    """Do `work`, and raise on all ranks where one fails, its own error there. Collective."""
    try:
        work()
    except Exception as error:  # whatever it is, the others wait for this rank
        with suppress(InputError):
            _refuse_unknown(arithmetic, device, error)
        raise
    _refuse_unknown(arithmetic, device)


def _refuse_unknown(arithmetic: Arithmetic, device: torch.device, failed: Exception | None = None) -> None:
    """Raise InputError on all ranks where one has failed, or its model has used an operator that may give other bits elsewhere.
    Collective."""

    def known() -> None:
        if failed is not None:
            raise failed
        if arithmetic.unknown:
            raise InputError(
                f"canonical=True does not know whether these give an element the same bits in every batch and layout: "
                f"{', '.join(sorted(arithmetic.unknown))}; {_OTHERWISE}"
            )

    together(known, device=device, doing="canonical arithmetic", raising=InputError)


def _not_proven(sharded: ShardedModel) -> Iterator[str]:
    model, config, layout = sharded.model, sharded.config, sharded.mesh.layout
    if find_experts(model):
        yield "a mixture of experts"
    if any(name.endswith(SCALES) for name, _ in model.named_parameters()):
        yield "quantised weights"
    if adapted_layers(model):
        yield "adapters"
    if layout.cp > 1 or layout.ep > 1:
        yield f"parallel.cp = {layout.cp} and parallel.ep = {layout.ep}"
    if sharded.hooks.of(Streaming) is not None:
        yield "streamed weights"
    if config.parameter_offload.device != "none":
        yield f"parameters on {config.parameter_offload.device} (zero_optimization.offload_param)"
    if config.compile.enabled:
        yield "torch.compile"
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention not in (None, "sdpa", "eager"):
        yield f'the attention "{attention}"{_OTHER_ATTENTION if getattr(model, "_supports_sdpa", False) else ""}'


def _dtype(sharded: ShardedModel) -> torch.dtype:
    compute = sharded.config.precision.compute
    return dtype_of(compute) if compute else next(p.dtype for p in sharded.model.parameters() if p.is_floating_point())
