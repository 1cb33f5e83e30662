"""Tensor parallelism of a Llama block, compared with torch's parallel styles applied by hand."""

from collections import Counter

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake.tensor_blocks import RANKS, by_hand, by_plait, step
from tests.measured.traffic import count_traffic


class Operators(TorchDispatchMode):
    """Counts the operators that reach the dispatcher on plain tensors."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count(model, *, sequence):
    """Return calls, bytes and operators of one forward and backward of the first block."""
    for _ in range(2):  # the first run fills the caches of DTensor
        with count_traffic() as traffic, Operators() as operators:
            step(model, sequence=sequence)
    calls = Counter(call.kind for call in traffic.calls)
    # gloo builds its reduce-scatter from an all-to-all.
    calls["reduce_scatter"] += calls.pop("all_to_all", 0)
    return calls, traffic.bytes(), operators.counts


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_no_more_calls_bytes_and_operators_than_torch(fake_world, sequence):
    fake_world(RANKS)
    our_calls, our_bytes, our_operators = count(by_plait(sequence=sequence), sequence=sequence)
    their_calls, their_bytes, their_operators = count(by_hand(sequence=sequence), sequence=sequence)
    for kind in ("all_gather", "reduce_scatter", "all_reduce") if sequence else ("all_reduce",):
        assert our_calls[kind] <= their_calls[kind], (our_calls, their_calls)
        assert our_bytes[kind] <= their_bytes[kind], (our_bytes, their_bytes)
    # 1 % is for the adapters of torch 2.11.
    difference = our_operators - their_operators
    assert our_operators.total() <= 1.01 * their_operators.total(), difference
