"""Which piece goes where: every element of every target once, from a rank that has it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from plait.errors import InputError
from plait.inference.weight_sync import messages, route
from plait.inference.weight_sync.holdings import Held
from plait.shards import shard_length, shard_size

SHAPE = (7, 10)


def cut(dim: int, ranks: int) -> list[dict[str, Held]]:
    """A tensor cut along a dimension by torch.chunk's rule."""
    found = []
    for rank in range(ranks):
        window = [(0, size) for size in SHAPE]
        window[dim] = min(rank * shard_size(SHAPE[dim], ranks), SHAPE[dim]), shard_length(SHAPE[dim], ranks, rank)
        found.append({"weight": Held("float32", SHAPE, tuple(window))})
    return found


WHOLE = {"weight": Held("float32", SHAPE, ((0, 7), (0, 10)))}
SIDES = {
    "rows of 3": cut(0, 3),
    "columns of 4": cut(1, 4),
    "rows of 5, one empty": cut(0, 5),
    "replicas": [WHOLE] * 3,
    "one of two": [{}, WHOLE],
}


@pytest.mark.parametrize(("one", "other"), list(product(SIDES, repeat=2)))
@pytest.mark.parametrize("same_ranks", [True, False])
def test_every_element_arrives_once(monkeypatch: pytest.MonkeyPatch, one: str, other: str, same_ranks: bool) -> None:
    monkeypatch.setattr(route, "PIECE", 24)
    sources, targets = SIDES[one], SIDES[other]
    everyone = [(side, rank) for side, ranks in (("source", sources), ("target", targets)) for rank in range(len(ranks))]
    pieces = route.pieces_of(sources, targets, same_ranks=same_ranks, mine=everyone)
    arrived = {rank: torch.zeros(SHAPE, dtype=torch.int32) for rank in range(len(targets))}
    counted = torch.zeros(SHAPE, dtype=torch.int32)
    for piece in pieces:
        place = tuple(slice(start, start + size) for start, size in piece.window)
        assert 0 < piece.size <= 24
        held = sources[piece.source]["weight"].window
        assert all(a <= start and start + size <= a + length for (a, length), (start, size) in zip(held, piece.window, strict=True))
        if same_ranks and one == other:
            assert piece.source == piece.target, "what a rank has is not sent"
        arrived[piece.target][place] += 1
        counted[place] += piece.is_counted
    assert bool((counted == 1).all())
    for rank, found in arrived.items():
        wanted = torch.zeros(SHAPE, dtype=torch.int32)
        if targets[rank]:
            wanted[tuple(slice(start, start + size) for start, size in targets[rank]["weight"].window)] = 1
        assert torch.equal(found, wanted)
    mine = [piece for piece in pieces if piece.target == 1]
    assert route.pieces_of(sources, targets, same_ranks=same_ranks, mine=[("target", 1)]) == mine


def test_tied_names_go_once_where_both_sides_tie_them() -> None:
    tied = WHOLE | {"head": Held("float32", SHAPE, WHOLE["weight"].window, "weight")}
    apart = WHOLE | {"head": WHOLE["weight"]}
    for source, target, expected in ((tied, tied, 1), (tied, apart, 2), (apart, tied, 2)):
        assert len(route.pieces_of([source], [target], same_ranks=False, mine=[("target", 0)])) == expected


def test_models_that_differ() -> None:
    def hears(source: dict[str, Held], target: dict[str, Held]) -> str:
        with pytest.raises(InputError) as found:
            route.pieces_of([source], [target], same_ranks=False, mine=[("target", 0)])
        return str(found.value)

    assert "lacks 1 tensors of the target (weight)" in hears({}, WHOLE) and "1 that the target lacks (weight)" in hears(WHOLE, {})
    assert "(7, 10) in the source and (10, 7) in the target" in hears(WHOLE, {"weight": Held("float32", (10, 7), ((0, 10), (0, 7)))})
    assert "hold 28 of 70 elements" in hears({"weight": Held("float32", SHAPE, ((0, 7), (0, 4)))}, WHOLE)


@pytest.mark.parametrize(
    ("one", "other"), [("rows of 3", "columns of 4"), ("replicas", "rows of 5, one empty"), ("columns of 4", "one of two")]
)
def test_messages_are_the_same_at_both_ends(monkeypatch: pytest.MonkeyPatch, one: str, other: str) -> None:
    """Every piece once, in messages that are not too large; small ones together, of two ranks in one order."""
    for module in (route, messages):
        monkeypatch.setattr(module, "PIECE", 256)
    monkeypatch.setattr(messages, "SMALL", 100)
    both = [[{f"{name} {at}": tensor for at in range(5) for name, tensor in held.items()} for held in SIDES[side]] for side in (one, other)]
    ends = [("source", rank) for rank in range(len(both[0]))] + [("target", rank) for rank in range(len(both[1]))]
    of_end = {end: messages.messages_of(route.pieces_of(*both, same_ranks=False, mine=[end])) for end in ends}
    count = 0
    for (side, rank), found in of_end.items():
        pieces = [piece for message in found for piece in message.pieces]
        assert sorted(pieces, key=str) == sorted(route.pieces_of(*both, same_ranks=False, mine=[(side, rank)]), key=str)
        for message in found:
            assert message.size <= 256 and len({(piece.source, piece.target) for piece in message.pieces}) == 1
            assert all(start % messages.ALIGNMENT == 0 for start in message.starts) and message.starts[0] == 0
            ends_ = [start + piece.size for start, piece in zip(message.starts, message.pieces, strict=True)]
            assert all(end <= start for end, start in zip(ends_, message.starts[1:], strict=False)) and ends_[-1] == message.size
            assert len(message.pieces) == 1 or all(piece.size < 100 for piece in message.pieces)
            count += len(message.pieces) > 1
        if side == "source":
            for target in range(len(both[1])):
                theirs = [message for message in of_end["target", target] if message.source == rank]
                assert [message for message in found if message.target == target] == theirs
    assert count, "some go together"
