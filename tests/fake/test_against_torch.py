"""A Llama block under tensor parallelism next to the same block split by hand with torch's own styles: collectives, bytes and operators
(level L1)."""

from collections import Counter

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake.tensor_blocks import RANKS, by_hand, by_plait, step
from tests.measured.traffic import count_traffic


class Operators(TorchDispatchMode):
    """Counts what reaches the dispatcher on plain tensors."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count(model, *, sequence):
    """(calls, bytes, operators) of one forward and backward of the first block."""
    for _ in range(2):  # DTensor's caches are warm in the second
        with count_traffic() as traffic, Operators() as operators:
            step(model, sequence=sequence)
    calls = Counter(
        "reduce_scatter" if call.kind == "all_to_all" else call.kind for call in traffic.calls
    )  # what gloo's is made of
    return dict(calls), traffic.bytes(), operators.counts


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_no_more_than_by_hand(fake_world, sequence):
    """The same collectives and bytes, and no more operators, besides 1 % for the adapters of torch 2.11."""
    fake_world(RANKS)
    our_calls, our_bytes, our_operators = count(by_plait(sequence=sequence), sequence=sequence)
    their_calls, their_bytes, their_operators = count(by_hand(sequence=sequence), sequence=sequence)
    for kind in ("all_gather", "reduce_scatter", "all_reduce") if sequence else ("all_reduce",):
        assert our_calls[kind] <= their_calls[kind], (our_calls, their_calls)
        assert our_bytes[kind] <= their_bytes[kind], (our_bytes, their_bytes)
    assert our_operators.total() <= 1.01 * their_operators.total(), (
        our_operators - their_operators,
        their_operators - our_operators,
    )
