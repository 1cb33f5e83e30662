"""Parameters and saved bytes of a model that Transformers builds, without allocating memory.

`as_built` counts the parameters on the meta device, for model families without formulas in the
planner.

`counted` counts the bytes that the blocks save for the backward, by running them on fake tensors.
The formulas of `block_bytes` are exact for a few families. For other families they are
approximations, which leave out what a family adds (soft caps on scores, norms after attention, head
sizes that torch's kernel does not support). If Transformers is installed, blocks of such a family
run once on fake tensors, with the planned sequence length and without parallelism. The result
corrects the formulas.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
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
from plait.errors import ModelError, PlaitError, first_line
from plait.losses.loss import causal_lm_loss
from plait.model.blocks import find_blocks
from plait.model.described import described_config
from plait.model.stages import block_list
from plait.parallel.accounting.activations import BlockMode
from plait.parallel.micro_batches import default_forward
from plait.parallel.parts import Parts
from plait.parallel.techniques.recompute import Recompute
from plait.planner.architecture import Architecture

COUNTED_BY_FORMULA = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "deepseek_v2", "deepseek_v3")
"""Families that the formulas cover exactly. Tests compare the formulas with measured bytes.

Plans do not measure DeepSeek's blocks, because its values are narrower than its keys. GPU kernels
support this, but the CPU kernels with which blocks are measured do not.
"""


@dataclass(frozen=True)
class Sizes:
    """Numbers of blocks and parameters of a causal language model. Tied parameters count once."""

    blocks: int
    in_blocks: int
    """Parameters of all blocks."""
    outside: int
    uncut: str
    """Reason why the blocks cannot be split into pipeline stages; empty if they can."""


def built(config: Mapping[str, Any], *, dropout: bool) -> nn.Module:
    """Build the model of a configuration on the meta device.

    Args:
        config: Hugging Face configuration.
        dropout: Whether the model has the dropout of the configuration. False disables it.

    Raises:
        Exception: Any error that Transformers raises for the configuration.
    """
    from transformers import AutoModelForCausalLM

    hf_config = _configuration(config)
    for part in _parts(hf_config):
        # Training uses no KV cache, whose tensors would count as saved.
        part.use_cache = False
        for name in _dropouts(part):
            # LayerDrop decides by a random value which layers run; a dry run has no values.
            if not dropout or "layer" in name:
                setattr(part, name, 0.0)

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, trust_remote_code=False
        )
    return model


def drops(config: Mapping[str, Any]) -> bool:
    """Return True if the model of a Hugging Face configuration has dropout in training."""
    for part in _parts(_configuration(config)):
        if any(value > 0 for value in _dropouts(part).values()):
            return True
    return False


def _configuration(config: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))


def _dropouts(part: Any) -> dict[str, float]:
    dropouts: dict[str, float] = {}
    for name, value in vars(part).items():
        if "drop" in name and isinstance(value, float):
            dropouts[name] = value
    return dropouts


def _parts(config: Any) -> Iterator[Any]:
    """Yield a configuration and its nested configurations."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_diff_dict"):
            yield from _parts(value)


_MOST_BLOCKS = 2000
"""Largest number of blocks to build. Each takes Transformers a millisecond or more."""


@lru_cache(maxsize=64)
def _sizes(config: str) -> Sizes | None:
    try:
        model = built(json.loads(config), dropout=False)
    except Exception:  # `plait train` reports the error when it builds the model
        return None
    blocks = find_blocks(model)
    # By identity, because blocks may share parameters.
    inside: dict[int, int] = {}
    for name in blocks:
        for parameter in model.get_submodule(name).parameters():
            inside[id(parameter)] = parameter.numel()
    outside = sum(
        parameter.numel() for parameter in model.parameters() if id(parameter) not in inside
    )

    uncut = ""
    try:
        block_list(model, blocks)
    except ModelError as error:
        uncut = str(error)
    return Sizes(len(blocks), sum(inside.values()), outside, uncut)


def as_built(model: Architecture, config: Mapping[str, Any]) -> Architecture:
    """Return `model` with the numbers of blocks and parameters that Transformers builds.

    The result is `model` itself if formulas cover its family, or if Transformers cannot build it.
    """
    is_exact = config.get("model_type") in COUNTED_BY_FORMULA
    if is_exact or model.layers > _MOST_BLOCKS or find_spec("transformers") is None:
        return model
    sizes = _sizes(json.dumps(config, sort_keys=True, default=str))
    if sizes is None:
        return model

    # Without repeated blocks, the layers are those of the description, and all other parameters are
    # outside them.
    if not sizes.blocks:
        ends = max(sizes.outside - int(model.block_parameters), 1)
        return replace(model, end_parameters=ends, uncut=sizes.uncut)
    return replace(
        model,
        layers=sizes.blocks,
        dense_layers=min(int(model.dense_layers), sizes.blocks),
        layer_parameters=sizes.in_blocks / sizes.blocks,
        end_parameters=sizes.outside,
        uncut=sizes.uncut,
    )


def why_refused(config: Mapping[str, Any]) -> str | None:
    """Return the reason why `plait train` cannot build the model of a configuration.

    The result is None if `plait train` can build the model, or if Transformers is not installed.
    """
    if find_spec("transformers") is None:
        return None

    try:
        described_config(config, defaults={})
        built(config, dropout=True)
    except PlaitError as error:
        return "; and ".join(str(error).splitlines())
    except Exception as error:  # each model validates in its own way
        return f"Transformers builds no such model ({type(error).__name__}: {first_line(error)})"

    return None


MISSING_SHARES = {
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
"""Share of a block's saved bytes that the formulas leave out, by family."""
_MAX_BLOCKS = 8
"""Largest number of blocks that are run. It covers the patterns of families with mixed blocks."""

_RECURRENT_TOKENS = 32
"""Most tokens for a recurrent model, whose bytes per token do not depend on the length."""
_SAMPLES = 2
"""Samples per run. With a single one, some families copy less per sample."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per token that a block saves for its backward."""

    linear: float
    """Bytes per token that do not depend on the sequence length."""
    scores: float
    """Bytes per token of the attention scores of all heads, which grow with the sequence length."""


@dataclass(frozen=True)
class CountedBytes:
    """Saved bytes of a block, measured on fake tensors and averaged over the blocks of a model."""

    none: SavedBytes
    """Saved bytes without recomputation."""
    operators: SavedBytes
    """Saved bytes if attention and every second product are saved."""
    full: float
    """Bytes per token of the inputs, which full recomputation saves."""
    working: SavedBytes
    """Bytes at the peak of the largest block's backward, including its saved tensors."""
    dropping: bool = False
    """True if the model was measured with the dropout of the configuration.

    If it was measured without dropout, formulas add the bytes of the masks.
    """
    dropped_scores: float = 0.0
    """Bytes per token of the masks and outputs of dropout on attention scores.

    The value is 0 unless a model with dropout was measured without it and its attention stores
    the scores.
    """


def counted(
    section: Mapping[str, Any], kind: str, *, sequence: int, precision: str, on_cores: bool
) -> CountedBytes | None:
    """Measure the bytes that a model's blocks save for the backward, on fake tensors.

    Args:
        section: `model` section of a configuration.
        kind: `model_type` of its Hugging Face configuration.
        sequence: Tokens per sample.
        precision: Name in `hardware.PRECISIONS`.
        on_cores: Whether the planned run is on CPU cores. For CPU cores the model runs with its
            dropout. GPU kernels apply dropout inside attention. For GPUs the model therefore runs
            without dropout, unless its attention stores the scores.

    Returns:
        The measured bytes. None if formulas cover the family, if the model's code reads values of
        tensors, or if Transformers is not installed.
    """
    if find_spec("transformers") is None or kind in COUNTED_BY_FORMULA:
        return None
    config = section.get("config") or _config_of_folder(section.get("path"))
    if not config:
        return None

    # As text, because the cached function needs hashable arguments.
    return _counted(json.dumps(config, sort_keys=True, default=str), sequence, precision, on_cores)


def not_counted(
    section: Mapping[str, Any],
    kind: str,
    *,
    sequence: int,
    precision: str,
    on_cores: bool,
    compiled: bool,
) -> str | None:
    """Return a note if a model's saved bytes come from an approximate formula, otherwise None."""
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

    direction = "may be too low"
    if kind in MISSING_SHARES:
        direction = f"leaves out {MISSING_SHARES[kind]} of what they keep"
    return (
        f"{kind}: the bytes that its blocks keep for the backward are computed by a formula and"
        f" not counted ({reason}), which {direction}"
    )


def _config_of_folder(path: Any) -> Mapping[str, Any] | None:
    try:
        config: Mapping[str, Any] = json.loads(
            (Path(str(path)) / "config.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return None
    return config


@lru_cache(maxsize=64)
def _counted(config: str, sequence: int, precision: str, on_cores: bool) -> CountedBytes | None:
    try:
        with without_failed_operators():
            return _count(json.loads(config), sequence, precision, on_cores)
    except Exception:  # `plait train` reports the error when it builds the model
        return None


def _count(config: dict[str, Any], sequence: int, precision: str, on_cores: bool) -> CountedBytes:
    dropping = drops(config)
    if dropping and on_cores:
        return _count_model(built(config, dropout=True), sequence, precision, dropping=True)
    counted_model = _count_model(built(config, dropout=False), sequence, precision, dropping=False)
    if not dropping or not counted_model.none.scores:
        return counted_model
    scores = (
        _saved_bytes(built(config, dropout=True), sequence, precision).scores
        - counted_model.none.scores
    )
    width = 2 if precision in ("bf16", "fp16") else 4

    # A mask has one byte per element on GPUs, and the width of the result on CPU cores.
    return replace(counted_model, dropped_scores=max(scores, 0.0) * (1 + width) / (2 * width))


def _count_model(
    model: nn.Module, sequence: int, precision: str, *, dropping: bool
) -> CountedBytes:
    blocks, shares = _keep_one_block_per_kind(model)
    lengths = _lengths(model, blocks, sequence, precision)
    long = _run(model, blocks, "none", lengths[0], precision)
    short = _run(model, blocks, "none", lengths[1], precision)
    results = _run(model, blocks, "selective", lengths[0], precision)
    inputs = _run(model, blocks, "full", lengths[0], precision)
    return CountedBytes(
        none=_extrapolate(long.saved(shares), short.saved(shares), lengths, sequence),
        operators=SavedBytes(results.saved(shares), 0.0),
        full=inputs.saved(shares),
        working=_extrapolate(long.working, short.working, lengths, sequence),
        dropping=dropping,
    )


def _saved_bytes(model: nn.Module, sequence: int, precision: str) -> SavedBytes:
    """Return the saved bytes of a model's blocks without recomputation."""
    blocks, shares = _keep_one_block_per_kind(model)
    lengths = _lengths(model, blocks, sequence, precision)
    long = _run(model, blocks, "none", lengths[0], precision).saved(shares)
    short = _run(model, blocks, "none", lengths[1], precision).saved(shares)
    return _extrapolate(long, short, lengths, sequence)


def _lengths(
    model: nn.Module, blocks: tuple[str, ...], sequence: int, precision: str
) -> tuple[int, int]:
    """Return (long, short) sequence lengths at which bytes are measured for `_extrapolate`.

    Some recurrent models of Transformers call operators per token. Counting at the full length
    would take minutes to hours, so both lengths are short for such models.
    """
    calls = []
    for length in (4, 8):
        with _CountCalls() as mode:
            _run(model, blocks, "none", length, precision)
        calls.append(mode.count)
    most = sequence
    if calls[1] > calls[0]:
        # Twice the tokens take more calls: the model has a recurrence.
        most = min(sequence, _RECURRENT_TOKENS)
    return most, max(most // 2, 1)


class _CountCalls(TorchFunctionMode):
    """Function mode that counts the calls of torch functions."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _keep_one_block_per_kind(model: nn.Module) -> tuple[tuple[str, ...], list[float]]:
    """Truncate each list of blocks to its shortest beginning that contains all kinds of blocks.

    Returns:
        Names of the remaining blocks, and the share of all blocks that each of them represents.
        The share is 0 for all but the first block of a kind.
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
        # In reverse order, so that the first block of each kind is the one that remains.
        first = {kinds[name]: index for index, name in reversed(list(enumerate(inside)))}
        run = min(max(first.values()) + 1, _MAX_BLOCKS)
        blocks += inside[:run]
        shares += [
            many[kinds[name]] / len(names) if first[kinds[name]] == index else 0.0
            for index, name in enumerate(inside[:run])
        ]
        del cast("nn.ModuleList", model.get_submodule(container))[run:]

    return tuple(blocks), [share / sum(shares) for share in shares]


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for blocks that save the same number of bytes.

    The key consists of the classes of the modules, the shapes of the parameters, and whether
    attention has a sliding window.
    """
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
    windows = tuple(bool(getattr(module, "is_sliding", False)) for module in block.modules())
    return tuple(type(module).__name__ for module in block.modules()), shapes, windows


def _extrapolate(
    at_long: float, at_short: float, lengths: tuple[int, int], sequence: int
) -> SavedBytes:
    """Return the saved bytes per token at the planned length, given those at two lengths.

    Both lengths are shorter than the planned one only for recurrent models. Such a model saves some
    bytes per token and some bytes per sequence, and neither number depends on the length.
    """
    long, short = lengths
    if long < sequence:
        each = (at_long * long - at_short * short) / max(long - short, 1)
        return SavedBytes(each + (at_long - each) * long / sequence, 0.0)
    each = max((at_long - at_short) / max(long - short, 1), 0.0)
    return SavedBytes(at_long - each * long, each * sequence)


@dataclass(frozen=True)
class _Run:
    """Result of one forward and backward on fake tensors."""

    trace: StageTrace
    tokens: int

    def saved(self, shares: list[float]) -> float:
        """Return the saved bytes per token, averaged over blocks."""
        by_block = zip(shares, self.trace.figures.saved, strict=True)
        return sum(share * nbytes for share, nbytes in by_block) / self.tokens

    @property
    def working(self) -> float:
        """Bytes per token at the peak of a block's backward, without tensors of earlier blocks."""
        saved = self.trace.figures.saved
        peak = 0
        for moment in self.trace.moments.backward:
            if moment.unit >= 0:
                earlier = sum(saved[: moment.unit])
                peak = max(peak, moment.peak.activations + moment.peak.temporaries - earlier)
        return peak / self.tokens


def _run(
    model: nn.Module, blocks: tuple[str, ...], mode: BlockMode, length: int, precision: str
) -> _Run:
    recompute = Recompute(mode=mode, every=1)
    alone = cast("Any", SimpleNamespace())  # stands in for a mesh, which is not used
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
