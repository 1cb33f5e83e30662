"""Which piece goes where: every element of every target once, from a rank that has it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from plait.errors import InputError
from plait.inference.weight_sync import route
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
