"""What blocks of a model keep for their backward, counted where Transformers is installed: some of
them run once without data.

`own` knows a few families to the byte. Of the others it has a formula of Llama's or GPT-2's kind,
which leaves out what a family does besides (soft caps on scores, norms behind attention, keys that
torch's kernel does not take): there the formula is held against this count at the planned sequence,
on one rank, and corrected by it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from plait._torch.operators import TorchFunctionMode, without_failed_operators
from plait.dryrun.dry_model import DryModel, StageTrace, token_batch
from plait.losses.loss import causal_lm_loss
from plait.model.blocks import find_blocks
from plait.parallel.accounting.activations import BlockMode
from plait.parallel.activations.recompute import Recompute
from plait.parallel.micro_batches import default_forward
from plait.parallel.technique import Parts
from plait.planner.built import COUNTED_BY_FORMULA, built, drops

TOO_LOW = {
    **dict.fromkeys(
        (
            "afmoe",
            "bitnet",
            "codegen",
            "falcon",
            "gemma2",
            "gemma3_text",
            "gpt_neo",
            "gpt_oss",
            "gptj",
        ),
        "more than a third",
    ),
    **dict.fromkeys(("glm4", "olmo2", "apertus", "exaone4", "flex_olmo"), "up to a quarter"),
}
"""Families of which formulas leave out so much of what a block keeps."""
_MOST_BLOCKS = 8
"""That are run: enough for the patterns in which families mix kinds of blocks."""

_BY_TOKEN = 32
"""Tokens of a sequence of which a recurrence is run: their bytes do not depend on its length."""
_SAMPLES = 2
"""Of one, some families copy less than of each of several."""


@dataclass(frozen=True)
class Kept:
    """Bytes a token."""

    linear: float
    """Whatever the sequence's length."""
    scores: float
    """What grows with it: attention's scores, of all heads."""


@dataclass(frozen=True)
class Counted:
    """Of a block, the mean of a model's blocks."""

    none: Kept
    operators: Kept
    """Where attention and every second product are kept."""
    full: float
    """Where all is computed again: bytes a token of its inputs."""
    working: Kept
    """At the peak of a block's backward, what it kept included; of the block that needs most."""
    dropping: bool = False
    """Whether the model dropped, as the one of the configuration does. One that does not keeps no
    mask, and formulas have them.
    """
    dropped_scores: float = 0.0
    """Of a model that drops and was counted without: bytes a token of masks and results of a
    dropout of scores that are in memory anyway.
    """


def counted(
    section: Mapping[str, Any], kind: str, *, sequence: int, precision: str, on_cores: bool
) -> Counted | None:
    """Of the model of a configuration's `model` section; None for a family that needs no count, for
    one whose code looks at values, and without Transformers. `on_cores`: for processes on CPU
    cores, which is where a count runs: a model that drops is counted as it drops. Of GPUs, whose
    kernels drop inside of attention, it is counted without, but for attention that has its scores
    in memory.
    """
    if find_spec("transformers") is None or kind in COUNTED_BY_FORMULA:
        return None
    config = section.get("config") or _of_folder(section.get("path"))
    return (
        _counted(json.dumps(config, sort_keys=True, default=str), sequence, precision, on_cores)
        if config
        else None
    )


def not_counted(
    section: Mapping[str, Any],
    kind: str,
    *,
    sequence: int,
    precision: str,
    on_cores: bool,
    compiled: bool,
) -> str | None:
    """What to tell of a family that needs a count and has none; None for others."""
    if kind in COUNTED_BY_FORMULA:
        return None
    if compiled:
        reason = "blocks are compiled"
    elif find_spec("transformers") is None:
        reason = "Transformers is not installed"
    elif (
        counted(section, kind, sequence=sequence, precision=precision, on_cores=on_cores)
        is not None
    ):
        return None
    else:
        reason = "its blocks do not run without data"
    much = TOO_LOW.get(kind)
    direction = f"leaves out {much} of what they keep" if much else "may be too low"
    return (
        f"{kind}: what its blocks keep for the backward is by formula and not counted ({reason}),"
        f" which {direction}"
    )


def _of_folder(path: Any) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = json.loads(
            (Path(str(path)) / "config.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return None
    return found


@lru_cache(maxsize=64)
def _counted(config: str, sequence: int, precision: str, on_cores: bool) -> Counted | None:
    try:
        with without_failed_operators():
            return _count(json.loads(config), sequence, precision, on_cores)
    except Exception:  # what Transformers or the dry run refuses they tell where the model is built
        return None


def _count(config: dict[str, Any], sequence: int, precision: str, on_cores: bool) -> Counted:
    dropping = drops(config)
    if dropping and on_cores:
        return _count_one(built(config, dropout=True), sequence, precision, dropping=True)
    found = _count_one(built(config, dropout=False), sequence, precision, dropping=False)
    if not dropping or not found.none.scores:
        return found
    scores = _kept(built(config, dropout=True), sequence, precision).scores - found.none.scores
    width = 2 if precision in ("bf16", "fp16") else 4
    # A mask is a byte an element on GPUs, and on CPU cores as wide as the result.
    return replace(found, dropped_scores=max(scores, 0.0) * (1 + width) / (2 * width))


def _count_one(model: nn.Module, sequence: int, precision: str, *, dropping: bool) -> Counted:
    blocks, shares = _first_of_each(model)
    lengths = _lengths(model, blocks, sequence, precision)
    long, short = (_run(model, blocks, "none", length, precision) for length in lengths)
    results = _run(model, blocks, "selective", lengths[0], precision)
    inputs = _run(model, blocks, "full", lengths[0], precision)
    return Counted(
        none=_line(long.kept(shares), short.kept(shares), lengths, sequence),
        operators=Kept(results.kept(shares), 0.0),
        full=inputs.kept(shares),
        working=_line(long.working, short.working, lengths, sequence),
        dropping=dropping,
    )


def _kept(model: nn.Module, sequence: int, precision: str) -> Kept:
    """Without recomputation."""
    blocks, shares = _first_of_each(model)
    lengths = _lengths(model, blocks, sequence, precision)
    long, short = (
        _run(model, blocks, "none", length, precision).kept(shares) for length in lengths
    )
    return _line(long, short, lengths, sequence)


def _lengths(
    model: nn.Module, blocks: tuple[str, ...], sequence: int, precision: str
) -> tuple[int, int]:
    """Two, of which the bytes tell what grows with the sequence. Some of Transformers' recurrences,
    without kernels of their own, call operators for every token: of a whole sequence a count would
    take minutes to hours.
    """
    calls = []
    for length in (4, 8):
        with _Calls() as mode:
            _run(model, blocks, "none", length, precision)
        calls.append(mode.count)
    most = min(sequence, _BY_TOKEN) if calls[1] > calls[0] else sequence
    return most, max(most // 2, 1)


class _Calls(TorchFunctionMode):
    """Counts calls of torch's functions."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _first_of_each(model: nn.Module) -> tuple[tuple[str, ...], list[float]]:
    """(blocks that are left of a model, of all blocks the share that is like each of them): the
    first of every list of them, as many as it takes to have one of each kind.
    """
    names = find_blocks(model)
    kinds = {name: (name.rpartition(".")[0], *_kind(model.get_submodule(name))) for name in names}
    many = Counter(kinds.values())
    lists: dict[str, list[str]] = {}
    for name in names:
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    blocks = []
    shares = []
    for container, inside in lists.items():
        first = {kinds[name]: index for index, name in reversed(list(enumerate(inside)))}
        run = min(max(first.values()) + 1, _MOST_BLOCKS)
        blocks += inside[:run]
        shares += [
            many[kinds[name]] / len(names) if first[kinds[name]] == index else 0.0
            for index, name in enumerate(inside[:run])
        ]
        del cast("nn.ModuleList", model.get_submodule(container))[run:]
    return tuple(blocks), [share / sum(shares) for share in shares]


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What makes two blocks keep the same: modules, shapes, and the window that attention sees."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    windows = tuple(bool(getattr(module, "is_sliding", False)) for module in block.modules())
    return tuple(type(module).__name__ for module in block.modules()), shapes, windows


def _line(at_long: float, at_short: float, lengths: tuple[int, int], sequence: int) -> Kept:
    """From bytes a token at two lengths those at the planned one: what grows with the sequence and
    what does not. Of a recurrence, which is run of a few tokens, nothing grows, and what it has
    once a sequence is a part of them that becomes less.
    """
    long, short = lengths
    if long < sequence:
        each = (at_long * long - at_short * short) / max(long - short, 1)
        return Kept(each + (at_long - each) * long / sequence, 0.0)
    each = max((at_long - at_short) / max(long - short, 1), 0.0)
    return Kept(at_long - each * long, each * sequence)


@dataclass(frozen=True)
class _Run:
    """A forward and a backward."""

    trace: StageTrace
    tokens: int

    def kept(self, shares: list[float]) -> float:
        """Bytes a token, the mean of blocks."""
        return (
            sum(share * kept for share, kept in zip(shares, self.trace.figures.kept, strict=True))
            / self.tokens
        )

    @property
    def working(self) -> float:
        """Bytes a token at the peak of a block's backward, without what the blocks before kept."""
        kept = self.trace.figures.kept
        blocks = [moment for moment in self.trace.moments.backward if moment.unit >= 0]
        return (
            max(
                moment.peak.activations + moment.peak.temporaries - sum(kept[: moment.unit])
                for moment in blocks
            )
            / self.tokens
        )


def _run(
    model: nn.Module, blocks: tuple[str, ...], mode: BlockMode, length: int, precision: str
) -> _Run:
    recompute = Recompute(mode=mode, every=1)
    alone = cast("Any", SimpleNamespace())  # a mesh, of which nothing is looked at
    dry = DryModel(
        model,
        lambda fake: (recompute.apply(Parts(fake, blocks), alone), None),
        device=torch.device("cpu"),
        batch=token_batch(_SAMPLES, length),
        compute_dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision),
        loss_fn=causal_lm_loss,
        forward=lambda _: default_forward,
    )
    return _Run(dry.trace()[0], _SAMPLES * length)
