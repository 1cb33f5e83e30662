"""Row of a table of published runs as a job that can be priced.

Sources write devices, frameworks and techniques in many ways. What a row leaves open becomes
several variants. `NotPriced` has the reason why a row has no prediction.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from benchmarks.planner_accuracy.frameworks import framework
from plait.errors import InputError
from plait.planner import hardware, models
from plait.planner.architecture import Architecture
from plait.planner.hardware import DEVICE_FAMILIES, PRECISIONS, DeviceSpec
from plait.planner.job import RECOMPUTE, SCHEDULES, Framework

Row = Mapping[str, str]
Value = TypeVar("Value")

_NEW_FAMILIES = ("hopper", "blackwell", "cdna3")
_STAGES_WITHOUT_LAYERS = 4
"""Frameworks that cut a model at every module have stages without a layer: embedding, norm, ..."""
_EFA_STEP = 100e-6
"""Seconds. On four nodes of eight, an all-reduce of 256 MB reaches half of the bandwidth and one of
16 MB an eighth (stas00/ml-engineering, network benchmarks)."""

_ANSWERS = {"y": True, "yes": True, "1": True, "true": True}
_ANSWERS |= {"n": False, "no": False, "0": False, "false": False}

# In these tables the first pattern that occurs in the text counts.
_SCHEDULES = (
    (r"\bzb-?v\b|zbv|zb-?2p", "zbv"),
    (r"zb-?(1p|h1)", "zb-h1"),
    (r"dualpipe", "dualpipev"),
    (r"gpipe", "gpipe"),
)
_PRECISIONS = (("fp4", "fp4"), ("fp8|float8", "fp8"), ("fp32|tf32", "fp32"), ("fp16", "fp16"))
_STAGES = (
    (r"grad_op", 2),
    (r"zero-?3|zero\+\+|full_shard|fsdp|gemini", 3),
    (r"zero-?2", 2),
    (r"zero-?1|distributed ?optimizer", 1),
    (r"zero-?0|none|ddp", 0),
)
_RECOMPUTE = (
    (r"other layer|2nd", ("full", 0.5)),
    (r"per-op|selectiveac|op-sac", ("operators", 1.0)),
    (r"^(?!.*none).*selective", ("selective", 1.0)),
    (r"full|^(y|yes)$", ("full", 1.0)),
)
"""Mode, and the share of layers that it is used for."""
_NETWORKS = (
    (r"(?P<count>\d+)\s*x\s*(?P<rate>\d+(?:\.\d+)?)\s*gb", 1),
    (r"(?P<count>\d+)\s*(?:x\s*)?omni-path", 100),
    (r"(?P<rate>\d+(?:\.\d+)?)\s*tb(?:ps|/s|it)", 1000),
    (r"(?P<rate>\d{3,4})\s*gb(?:ps|/s|it/s)?[^;,]*(?:/|per )\s*node", 1),
)
"""Descriptions of the network of a node, and the gigabits per second of `rate` or of a link."""


class NotPriced(Exception):
    """The row has no prediction. The message is the reason."""


@dataclass(frozen=True)
class Variant:
    """Choice of what a row leaves open."""

    row: int
    model: Architecture
    device: DeviceSpec
    framework: Framework
    layout: dict[str, float]
    sequence: int
    precision: int
    assumed: tuple[str, ...]


def variants_of(index: int, row: Row) -> list[Variant]:
    """Return every way to fill in what a row leaves open. Raises NotPriced."""
    model = model_of(row)
    device = device_of(row)
    precision, states = precision_of(row)
    if np.isnan(device.flops.get(precision, np.nan)):
        raise NotPriced(f"{device.title} has no {precision}")
    sequence = _required(row, "seq_len")
    year = count_of(row, "year")
    is_new_device = DEVICE_FAMILIES[device.family] in _NEW_FAMILIES
    # Models of 2023 and later have gated MLPs or long sequences.
    is_recent_model = year is None and (bool(model.gated) or sequence >= 8192)
    stack = framework(
        row.get("framework") or "unknown",
        states=states,
        precision=precision,
        newer=is_new_device or precision in ("fp8", "fp4") or (year or 0) >= 2023,
        recent=is_recent_model,
    )

    layout, assumed = _layout(row, model)
    dp = layout["dp_replicate"] * layout["dp_shard"]
    batch = count_of(row, "global_batch")
    micro_batch = count_of(row, "micro_batch")
    if batch is None:
        if micro_batch is None:
            raise NotPriced("neither global_batch nor micro_batch is given")
        batch = int(micro_batch * dp)
        assumed.append(f"global_batch {batch}: one micro-batch a rank")
    per_rank = batch / dp
    if micro_batch is None:
        sizes = [size for size in (1, 2, 4, 8, 16) if size <= per_rank] or [1]
    else:
        sizes = [micro_batch]

    variants = []
    for size in sizes:
        accumulation = max(per_rank / size, 1)
        for vpp in _chunks(row, int(layout["pp"]), model, accumulation):
            notes = list(assumed)
            if micro_batch is None:
                notes.append(f"micro_batch {size}")
            if not row.get("vpp") and layout["pp"] > 1:
                notes.append(f"vpp {vpp}")
            candidate = layout | {
                "micro_batch": min(size, per_rank),
                "accumulation": accumulation,
                "vpp": vpp,
                "schedule": SCHEDULES.index(_schedule(row, int(layout["pp"]), vpp)),
            }
            number = PRECISIONS.index(precision)
            variants.append(
                Variant(index, model, device, stack, candidate, sequence, number, tuple(notes))
            )
    return variants


def _first_match(text: str, table: Sequence[tuple[str, Value]], default: Value) -> Value:
    for pattern, value in table:
        if re.search(pattern, text):
            return value
    return default


def _chunks(row: Row, pp: int, model: Architecture, micro_batches: float) -> list[int]:
    vpp = count_of(row, "vpp")
    if vpp is not None or pp == 1:
        return [vpp or 1]
    text = _text(row)
    if micro_batches < pp or ("1f1b" in text and "1f1b-i" not in text):
        return [1]
    chunks = [1]
    for count in (2, 4):
        if model.layers // pp % count == 0 and model.layers % (pp * count) == 0:
            chunks.append(count)
    return chunks


def _text(row: Row) -> str:
    keys = ("framework", "notes", "zero_or_fsdp", "model_name")
    return " ".join(row.get(key) or "" for key in keys).lower()


def _schedule(row: Row, pp: int, vpp: int) -> str:
    if pp == 1:
        return "none"
    return _first_match(_text(row), _SCHEDULES, "interleaved" if vpp > 1 else "1f1b")


def count_of(row: Row, key: str) -> int | None:
    """Return a whole number of at least 1, or None for anything else."""
    number = number_of(row, key)
    if number is None:
        return None
    return max(round(number), 1)


def _required(row: Row, key: str) -> int:
    count = count_of(row, key)
    if count is None:
        raise NotPriced(f"{key} is not given")
    return count


def number_of(row: Row, key: str) -> float | None:
    """Return the positive number at the start (`8192 (packed)`, `128k`), or None."""
    pattern = r"\s*(\d+(?:[.,]?\d+)*(?:e[+-]?\d+)?)\s*(k?)"
    match = re.match(pattern, str(row.get(key) or ""), re.IGNORECASE)
    if not match:
        return None
    try:
        value = float(match[1].replace(",", "")) * 1024 ** len(match[2])
    except ValueError:  # several points: a version or a date
        return None
    if 0 < value < 1e15:
        return value
    return None


def _is_true(row: Row, key: str) -> bool | None:
    return _ANSWERS.get((row.get(key) or "").strip().lower())


def model_of(row: Row) -> Architecture:
    """Return the model of a row. Raises NotPriced if it is not modelled, or has no sizes."""
    text = _text(row)
    name = row.get("model_name") or ""
    if "mamba" in text or "hybrid" in (row.get("moe") or ""):
        raise NotPriced(
            "the model mixes attention with other layers (Mamba), which is not modelled"
        )
    known = models.named(re.sub(r"\s*\(.*?\)|\s+truncated.*|\s+w/.*", "", name).strip())
    columns = {"layers": "n_layers", "hidden": "hidden", "heads": "n_heads"}
    sizes = {}
    missing = []
    for key, column in columns.items():
        sizes[key] = count_of(row, column)
        if sizes[key] is None:
            missing.append(key)
    if missing:
        if known is None:
            raise NotPriced(
                f"{', '.join(missing)} of the model not given, and {name or 'it'} is not in the "
                "table"
            )
        layers = sizes["layers"] or known.layers  # some tables cut a model's layers
        return replace(known, layers=layers, dense_layers=min(known.dense_layers, layers))

    layers, hidden, heads = (int(value or 0) for value in sizes.values())
    gated = _is_true(row, "gated_mlp")
    if gated is None:
        gated = "gpt" not in text
    tied = _is_true(row, "tied_emb")
    model = Architecture(
        layers,
        hidden,
        heads,
        count_of(row, "n_kv_heads") or heads,
        _head_dim(row, known, hidden, heads),
        count_of(row, "ffn_hidden") or 4 * hidden,
        count_of(row, "vocab") or (known.vocab if known is not None else 51200),
        gated=int(gated),
        tied=int(bool(tied)),
        bias=int(not gated),
        qk_norm=int("qwen3" in re.sub(r"[- ]", "", name.lower())),
        name=row.get("model_name"),
    )
    billions = number_of(row, "n_params_B")
    if tied is None and billions is not None:
        model = min(
            (replace(model, tied=0), replace(model, tied=1)),
            key=lambda candidate: abs(float(candidate.parameters) - billions * 1e9),
        )
    if (row.get("moe") or "").strip() not in ("", "n", "0"):
        return _with_experts(row, model, known)
    return model


def _head_dim(row: Row, known: Architecture | None, hidden: int, heads: int) -> int:
    """Return the size of a head: of the row, of the known model of this width, or by division."""
    size = count_of(row, "head_dim")
    if size is not None:
        return size
    match = re.search(r"head[_ ](?:dim|size) (\d+)", row.get("model_name") or "")
    if match and int(match[1]):
        return int(match[1])
    is_same = known is not None and (int(known.hidden), int(known.heads)) == (hidden, heads)
    if known is not None and is_same and not known.latent_rank:
        return int(known.head_dim)
    return max(hidden // heads, 1)


def _with_experts(row: Row, model: Architecture, known: Architecture | None) -> Architecture:
    if known is not None and known.experts:
        return known
    match = re.match(r"(\d+)\s*/\s*(\d+)(?:\s*\(\+(\d+)[^)]*\))?", row.get("moe") or "")
    if not match:
        raise NotPriced(
            f"experts {row.get('moe')!r} give neither their number nor how many a token uses"
        )
    experts, active, shared = (int(number or 0) for number in match.groups())
    ffn = model.ffn
    return replace(model, experts=experts, active=active, expert_ffn=ffn, shared_ffn=shared * ffn)


def device_of(row: Row) -> DeviceSpec:
    """Return the device of a row with its network. Raises NotPriced for an unknown device."""
    try:
        device = hardware.device(row.get("gpu") or "")
    except InputError as error:
        raise NotPriced(str(error)) from None
    per_node = count_of(row, "gpus_per_node") or int(device.devices_per_node)
    domain = per_node
    if device.domain > device.devices_per_node:
        domain = max(device.domain, per_node)
    device = replace(device, devices_per_node=per_node, domain=domain)
    interconnect = row.get("interconnect") or ""
    nic = network_bandwidth(interconnect, per_node)
    if nic:
        device = replace(device, nic_bandwidth=nic)
    if "efa" in interconnect.lower():
        device = replace(device, network_step=_EFA_STEP)
    return device


def network_bandwidth(text: str, per_node: int) -> float | None:
    """Return the bytes/s per device of a description of a network, or None.

    >>> network_bandwidth("8x200Gbps HDR IB per node (Selene)", 8) / 1e9
    25.0
    """
    for pattern, gigabits in _NETWORKS:
        match = re.search(pattern, text.lower())
        if match:
            groups = match.groupdict()
            total = int(groups.get("count", 1)) * float(groups.get("rate", 1)) * gigabits
            return total / 8 / per_node * 1e9
    return None


def precision_of(row: Row) -> tuple[str, str | None]:
    """Return the name in PRECISIONS, and a recipe of states if it is not the framework's."""
    written = (row.get("precision") or "").lower()
    # In brackets is what the states or single operations have.
    text = re.sub(r"\(.*?\)", "", written).strip() or written
    is_v100 = "v100" in (row.get("gpu") or "").lower()
    precision = _first_match(text, _PRECISIONS, "fp16" if is_v100 else "bf16")
    if precision == "fp32":
        return precision, "ddp-amp"
    if "pure" in written or "pure bf16" in (row.get("notes") or "").lower():
        return precision, "pure-16bit"
    return precision, None


def _layout(row: Row, model: Architecture) -> tuple[dict[str, float], list[str]]:
    """Return the degrees and techniques of a row, and what was assumed."""
    gpus = _required(row, "gpus_total")
    tp = _required(row, "tp")
    pp = _required(row, "pp")
    cp = count_of(row, "cp") or 1
    product = tp * pp * cp
    if gpus % product:
        raise NotPriced(f"tp x pp x cp = {product} does not divide {gpus} devices")
    if pp > model.layers + _STAGES_WITHOUT_LAYERS:
        raise NotPriced(f"{pp} stages and {model.layers} layers")

    dp = gpus // product
    sharding = (row.get("zero_or_fsdp") or "").lower()
    # Tables that say nothing are of frameworks whose default is ZeRO 1.
    stage = _first_match(sharding, _STAGES, int(dp > 1))
    within = re.search(r"within (\d+)", sharding)
    shard = dp
    if stage == 0:
        shard = 1
    elif within and dp % int(within[1]) == 0:
        shard = int(within[1])

    recompute = (row.get("recompute") or "").lower()
    mode, share = _first_match(recompute, _RECOMPUTE, ("none", 1.0))
    layers = re.search(r"(\d+) layers", recompute)
    if layers and int(layers[1]):
        mode = "full"
        share = min(int(layers[1]) / model.layers, 1.0)
    elif layers:
        mode = "none"
    layout = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "sp": int(bool(_is_true(row, "sp")) and tp > 1),
        "ep": count_of(row, "ep") or 1,
        "dp_replicate": dp // shard,
        "dp_shard": shard,
        "stage": stage,
        "recompute": RECOMPUTE.index(mode),
        "every": 1 / share,
        "offload": float("cpu offload" in sharding and "activation" not in sharding),
        "offload_activations": 0.5 * ("activation offload" in recompute),
    }
    return layout, [] if recompute else ["no recomputation"]
