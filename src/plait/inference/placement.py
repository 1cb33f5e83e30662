"""How many devices a model for inference is put on, from what it needs and what there is:
arithmetic alone.

One device where the model fits. Else tensor parallelism inside a machine, of the smallest degree
that fits: every device then works on every token, over fast links. Machines are joined by pipeline
stages, which exchange little. Where the devices of a machine have no fast links (`fast_links`
False), stages are taken inside of it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from plait.errors import InputError
from plait.units import format_bytes

WORKSPACE = 0.08
"""The part of a device's memory that weights and the cache leave free, for activations and the
allocator.
"""


class DoesNotFit(InputError):
    """No placement on these devices holds the model."""


@dataclass(frozen=True)
class Needs:
    """Of a model and what is asked of it."""

    weight_bytes: int
    split_bytes: int
    """Of those, what tensor parallelism splits; the rest is on each of its ranks."""
    cache: Callable[[int, int], int]
    """Degrees (tp, pp) to the bytes of keys and values, of all requests at once, on the device that
    keeps most.
    """
    heads: int
    key_value_heads: int
    layers: int


@dataclass(frozen=True)
class Placement:
    """Degrees, and what a device holds then."""

    tp: int
    pp: int
    weight_bytes: int
    cache_bytes: int
    why: str

    @property
    def devices(self) -> int:
        """How many it takes."""
        return self.tp * self.pp


def place_model(
    needs: Needs,
    *,
    machines: int,
    per_machine: int,
    device_bytes: int,
    fast_links: bool = True,
    tp: int | None = None,
    pp: int | None = None,
) -> Placement:
    """The placement on the fewest devices. `tp`, `pp`: chosen by the user. Raises DoesNotFit, with
    the numbers, where nothing fits, and InputError where a choice cannot be.
    """
    _check(needs, machines=machines, per_machine=per_machine, tp=tp, pp=pp)
    room = int(device_bytes * (1 - WORKSPACE))
    closest: Placement | None = None
    for one, stages in _degrees(needs, machines, per_machine, fast_links):
        if (tp is not None and one != tp) or (pp is not None and stages != pp):
            continue
        weights = -(
            -(needs.split_bytes // one + (needs.weight_bytes - needs.split_bytes)) // stages
        )
        cache = needs.cache(one, stages)
        why = "as asked for" if tp is not None or pp is not None else _why(one, stages, fast_links)
        found = Placement(one, stages, weights, cache, why)
        if weights + cache <= room:
            return found
        if closest is None or weights + cache < closest.weight_bytes + closest.cache_bytes:
            closest = found
    assert closest is not None
    raise DoesNotFit(
        f"the model does not fit: at tp = {closest.tp}, pp = {closest.pp} a device would hold"
        f" {format_bytes(closest.weight_bytes)} of weights and {format_bytes(closest.cache_bytes)}"
        f" of keys and values, and {format_bytes(room)} of its {format_bytes(device_bytes)} may be"
        f" used ({machines} x {per_machine} devices); use more devices, fewer tokens or requests at"
        " once, or a smaller dtype"
    )


def _degrees(
    needs: Needs, machines: int, per_machine: int, fast_links: bool
) -> Iterator[tuple[int, int]]:
    """(tp, pp) in the order in which they are tried; those that only a user's choice asks for come
    last.
    """
    inside = [
        degree
        for degree in range(1, per_machine + 1)
        if needs.heads % degree == 0 and _divides(degree, needs.key_value_heads)
    ]
    most = min(needs.layers, machines * per_machine)
    if fast_links:
        yield from ((degree, 1) for degree in inside)
        yield from ((inside[-1], count) for count in range(2, min(machines, needs.layers) + 1))
    else:
        yield from ((1, count) for count in range(1, most + 1))
    others = [
        (degree, count)
        for degree in inside
        for count in range(1, most + 1)
        if degree * count <= machines * per_machine
    ]
    yield from sorted(others, key=lambda at: (at[0] * at[1], -at[0]))


def _divides(degree: int, key_value_heads: int) -> bool:
    """Whether each rank has whole key and value heads, or all of several ranks have one."""
    return key_value_heads % degree == 0 or degree % key_value_heads == 0


def _check(
    needs: Needs, *, machines: int, per_machine: int, tp: int | None, pp: int | None
) -> None:
    if tp is not None and (tp < 1 or needs.heads % tp or not _divides(tp, needs.key_value_heads)):
        raise InputError(
            f"--tp {tp}: must divide the model's {needs.heads} attention heads, and divide or be a"
            f" multiple of its {needs.key_value_heads} key and value heads"
        )
    if tp is not None and tp > per_machine:
        raise InputError(
            f"--tp {tp}: a machine has {per_machine} devices, and tensor parallelism stays inside"
            " of one; use --pp, too"
        )
    if pp is not None and not 1 <= pp <= needs.layers:
        raise InputError(f"--pp {pp}: must be between 1 and the model's {needs.layers} layers")
    if (tp or 1) * (pp or 1) > machines * per_machine:
        raise InputError(
            f"--tp {tp or 1} x --pp {pp or 1}: {(tp or 1) * (pp or 1)} devices, and there are"
            f" {machines * per_machine}"
        )


def _why(tp: int, pp: int, fast_links: bool) -> str:
    if tp == pp == 1:
        return "it fits on one device"
    if pp == 1:
        return (
            f"the fewest devices of one machine that hold it are {tp}, and tensor parallelism lets"
            " all of them work on each token"
        )
    if tp == 1 and not fast_links:
        return (
            f"the devices of a machine have no fast links, so {pp} pipeline stages exchange little"
        )
    return f"{tp} devices of a machine do not hold it, so {pp} pipeline stages of {tp} devices do"
