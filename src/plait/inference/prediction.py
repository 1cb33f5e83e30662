"""How fast a model will generate on a deployment, and what limits it. Arithmetic, on times of a pass and rates of copies that were measured
or are a datasheet's."""

from __future__ import annotations

from dataclasses import dataclass

from plait.inference.deployment import Deployment
from plait.inference.pass_times import PassTimes
from plait.units import format_bytes


@dataclass(frozen=True)
class Beside:
    """How many times as long each takes while the other goes on."""

    computing: float = 1.0
    reading: float = 1.0

    def seconds(self, computing: float, reading: float) -> float:
        """Of both together, of which each takes so many seconds alone: when one has ended, the other goes on as if alone."""
        slow, other = self.computing * computing, self.reading * reading
        if not slow or not other:
            return computing + reading
        return slow + reading * (1 - slow / other) if slow < other else other + computing * (1 - other / slow)


@dataclass(frozen=True)
class CopyRates:
    """Bytes/s of what brings weights that do not stay."""

    files: float | None = None
    """None where nothing is read."""
    host: float | None = None
    """From pinned host memory to the GPU."""
    beside: tuple[Beside, Beside] = (Beside(), Beside())
    """Of computing and bringing, over the prompts and for a token: on the CPU they share cores and memory."""
    handover: float = 0.0
    """Seconds that a streamed layer costs besides."""
    source: str = ""
    """For a person."""


@dataclass(frozen=True)
class Prediction:
    """Of one batch of requests."""

    first_seconds: float
    """To the first token."""
    token_seconds: float
    """From one token of every request to the next."""
    tokens_per_second: float
    """Of all requests, once there is a first token."""
    tokens_per_second_in_all: float
    """With the time to the first token."""
    limit: str
    """What a token waits for."""
    first_limit: str
    """What the first token waits for."""


@dataclass(frozen=True)
class Batches:
    """Of requests that are decoded some at a time, one batch after another."""

    count: int
    last_first_seconds: float
    """To the first token of the last batch, from the start."""
    seconds: float
    """Of all of them."""
    tokens_per_second: float
    """Of all requests, over all this time."""


def in_batches(one: Prediction, *, requests: int, at_once: int, new: int) -> Batches:
    """`one` is of a batch of `at_once` requests. A last one of fewer counts like the others: it takes that long at most."""
    count = -(-requests // at_once)
    each = one.first_seconds + (new - 1) * one.token_seconds
    return Batches(count, (count - 1) * each + one.first_seconds, count * each, requests * new / (count * each))


def predict(deployment: Deployment, passes: PassTimes, copies: CopyRates, *, requests: int, new: int) -> Prediction:
    """Weights are brought while others compute, so a pass takes the longest of computing, reading and copying, and what they take from each
    other (`CopyRates.beside`). Streamed layers compute with the places of the stream, and those that stay between them give it more
    time."""
    account = deployment.account
    bringing = {}
    if account.in_files and copies.files:
        bringing[f"reading {format_bytes(account.in_files)} of weights from files at {copies.files / 1e9:.2f} GB/s"] = (
            account.in_files / copies.files
        )
    back = 0.0
    if copies.host and (copied := account.streamed + account.cache_copied):
        what = (
            "weights, keys and values"
            if account.cache_copied and account.streamed
            else "weights"
            if account.streamed
            else "keys and values"
        )
        bringing[f"copying {format_bytes(copied)} of {what} to the GPU at {copies.host / 1e9:.1f} GB/s"] = copied / copies.host
        back = account.cache_copied / copies.host  # what a token has added to goes back before the computation goes on

    def longest(computing: float, beside: Beside) -> tuple[float, str]:
        times = {"computation, and keys and values back to the host" if back else "computation": computing, **bringing}
        name = max(times, key=lambda key: times[key])
        together = beside.seconds(computing, max(bringing.values(), default=0.0))
        also = " (reading takes cores and memory from computing)" if together > 1.1 * times[name] else ""
        return together + account.streamed_layers * copies.handover, name + also

    first, first_limit = longest(passes.first + back, copies.beside[0])
    token, limit = longest(passes.token + back, copies.beside[1])
    return Prediction(first, token, requests / token, requests * new / (first + (new - 1) * token), limit, first_limit)
