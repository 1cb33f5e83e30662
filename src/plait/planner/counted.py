"""What blocks of a model keep for their backward, counted where Transformers is installed: some of them run once without data.

`own` knows a few families to the byte. Of the others it has a formula of Llama's or GPT-2's kind, which leaves out what a family does
besides (soft caps on scores, norms behind attention, keys that torch's kernel does not take): there the formula is held against this count
at the planned sequence, on one rank, and corrected by it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from plait.dryrun.dry_model import DryModel, StageTrace, token_batch
from plait.losses.loss import causal_lm_loss
from plait.model.blocks import find_blocks
from plait.parallel.accounting.activations import BlockMode
from plait.parallel.activations.recompute import Recompute
from plait.parallel.micro_batches import default_forward
from plait.parallel.technique import Parts

COUNTED_BY_FORMULA = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "deepseek_v2", "deepseek_v3")
"""Families that formulas know; tests compare. DeepSeek's values are narrower than its keys, for which CPU cores, where a count is made,
have no kernel, and GPUs do."""
TOO_LOW = {
    **dict.fromkeys(("afmoe", "bitnet", "codegen", "falcon", "gemma2", "gemma3_text", "gpt_neo", "gpt_oss", "gptj"), "more than a third"),
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
    """Of a block of a model without dropout, the mean of its blocks."""

    none: Kept
    operators: Kept
    """Where attention and every second product are kept."""
    working: Kept
    """At the peak of a block's backward, what it kept included; of the block that needs most."""


def counted(section: Mapping[str, Any], kind: str, *, sequence: int, precision: str) -> Counted | None:
    """Of the model of a configuration's `model` section; None for a family that needs no count, for one whose code looks at values, and
    without Transformers."""
    if find_spec("transformers") is None or kind in COUNTED_BY_FORMULA:
        return None
    config = section.get("config") or _of_folder(section.get("path"))
    return _counted(json.dumps(config, sort_keys=True, default=str), sequence, precision) if config else None


def not_counted(section: Mapping[str, Any], kind: str, *, sequence: int, precision: str, compiled: bool) -> str | None:
    """What to tell of a family that needs a count and has none; None for others."""
    if kind in COUNTED_BY_FORMULA:
        return None
    if compiled:
        reason = "blocks are compiled"
    elif find_spec("transformers") is None:
        reason = "Transformers is not installed"
    elif counted(section, kind, sequence=sequence, precision=precision) is not None:
        return None
    else:
        reason = "its blocks do not run without data"
    much = TOO_LOW.get(kind)
    direction = f"leaves out {much} of what they keep" if much else "may be too low"
    return f"{kind}: what its blocks keep for the backward is by formula and not counted ({reason}), which {direction}"


def _of_folder(path: Any) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = json.loads((Path(str(path)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


@lru_cache(maxsize=64)
def _counted(config: str, sequence: int, precision: str) -> Counted | None:
    try:
        return _count(json.loads(config), sequence, precision)
    except Exception:  # what Transformers or the dry run refuses they tell where the model is built
        return None


def _count(config: dict[str, Any], sequence: int, precision: str) -> Counted:
    model = _on_meta(config)
    blocks = find_blocks(model)
    shares = _shares(model, blocks)
    # Transformers computes some recurrences token by token.
    by_token = any(hasattr(module, "slow_forward") for module in model.modules())
    most = min(sequence, _BY_TOKEN) if by_token else sequence
    lengths = (most, max(most // 2, 1))
    del cast("nn.ModuleList", model.get_submodule(blocks[0].rpartition(".")[0]))[len(shares) :]
    blocks = blocks[: len(shares)]
    long, short = (_run(model, blocks, "none", length, precision) for length in lengths)
    results = _run(model, blocks, "selective", most, precision)
    return Counted(
        none=_line(long.kept(shares), short.kept(shares), lengths, sequence),
        operators=Kept(results.kept(shares), 0.0),
        working=_line(long.working, short.working, lengths, sequence),
    )


def _on_meta(config: dict[str, Any]) -> nn.Module:
    """The model of a configuration, without dropout."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    found = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    found.use_cache = False
    for name, value in vars(found).items():
        if "drop" in name and isinstance(value, float):
            setattr(found, name, 0.0)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(found, dtype=torch.float32)
    return model


def _shares(model: nn.Module, blocks: tuple[str, ...]) -> list[float]:
    """Of all blocks, those that are like each of the first: as many of them as it takes to have one of each kind."""
    kinds = [_kind(model.get_submodule(name)) for name in blocks]
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    many = Counter(kinds)
    run = min(max(first.values()) + 1, _MOST_BLOCKS)
    found = [many[kinds[index]] / len(kinds) if first[kinds[index]] == index else 0.0 for index in range(run)]
    return [share / sum(found) for share in found]


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """What makes two blocks keep the same: modules, shapes, and the window that attention sees."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    windows = tuple(bool(getattr(module, "is_sliding", False)) for module in block.modules())
    return tuple(type(module).__name__ for module in block.modules()), shapes, windows


def _line(at_long: float, at_short: float, lengths: tuple[int, int], sequence: int) -> Kept:
    """From two lengths, what grows with the sequence and what does not."""
    long, short = lengths
    each = max((at_long - at_short) / max(long - short, 1), 0.0)
    return Kept(at_long - each * long, each * sequence)


@dataclass(frozen=True)
class _Run:
    """A forward and a backward."""

    trace: StageTrace
    tokens: int

    def kept(self, shares: list[float]) -> float:
        """Bytes a token, the mean of blocks."""
        return sum(share * kept for share, kept in zip(shares, self.trace.figures.kept, strict=True)) / self.tokens

    @property
    def working(self) -> float:
        """Bytes a token at the peak of a block's backward, without what the blocks before kept."""
        kept = self.trace.figures.kept
        blocks = [moment for moment in self.trace.moments.backward if moment.unit >= 0]
        return max(moment.peak.activations + moment.peak.temporaries - sum(kept[: moment.unit]) for moment in blocks) / self.tokens


def _run(model: nn.Module, blocks: tuple[str, ...], mode: BlockMode, length: int, precision: str) -> _Run:
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
