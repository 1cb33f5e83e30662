"""One row of a table of published runs as a job that can be priced.

Sources write devices, frameworks and techniques in many ways. What a row leaves open becomes several
variants. `NotPriced` has the reason why a row has no prediction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.planner_accuracy.frameworks import framework
from plait.errors import InputError
from plait.planner import hardware, models
from plait.planner.architecture import Architecture
from plait.planner.hardware import DEVICE_FAMILIES, PRECISIONS, DeviceSpec
from plait.planner.job import RECOMPUTE, SCHEDULES, Framework

Row = Mapping[str, str]

_NEW_FAMILIES = ("hopper", "blackwell", "cdna3")
_STAGES_WITHOUT_LAYERS = 4
"""Frameworks that cut a model at every module have stages with no layer: embedding, norm, head, loss."""


class NotPriced(Exception):
    """The row has no prediction. The message is the reason."""


@dataclass(frozen=True)
class Variant:
    """One way to fill in what a row leaves open."""

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
    if np.isnan(device.flops.get(PRECISIONS[precision], np.nan)):
        raise NotPriced(f"{device.title} has no {PRECISIONS[precision]}")
    newer = (
        DEVICE_FAMILIES[device.family] in _NEW_FAMILIES
        or precision >= PRECISIONS.index("fp8")
        or (count_of(row, "year") or 0) >= 2023
    )
    name = row.get("framework") or "unknown"
    sequence = count_of(row, "seq_len")
    if sequence is None:
        raise NotPriced("seq_len is not given")
    recent = count_of(row, "year") is None and _is_recent(model, sequence)
    priced = framework(
        name, states=states, precision=PRECISIONS[precision], newer=newer, recent=recent
    )
    layout, assumed = _layout(row, model)
    batch = count_of(row, "global_batch")
    micro = count_of(row, "micro_batch")
    dp = layout["dp_replicate"] * layout["dp_shard"]
    if batch is None:
        if micro is None:
            raise NotPriced("neither global_batch nor micro_batch is given")
        batch = int(micro * dp)
        assumed.append(f"global_batch {batch}: one micro-batch a rank")
    found = []
    per_rank = batch / dp
    micros = (
        [micro]
        if micro is not None
        else [size for size in (1, 2, 4, 8, 16) if size <= per_rank] or [1]
    )
    for size in micros:
        for vpp in _chunks(row, layout, model, max(per_rank / size, 1)):
            note = list(assumed)
            if micro is None:
                note.append(f"micro_batch {size}")
            if not row.get("vpp") and layout["pp"] > 1:
                note.append(f"vpp {vpp}")
            schedule = _schedule(row, int(layout["pp"]), vpp)
            full = layout | {
                "micro_batch": min(size, per_rank),
                "accumulation": max(per_rank / size, 1),
                "vpp": vpp,
                "schedule": schedule,
            }
            found.append(
                Variant(index, model, device, priced, full, sequence, precision, tuple(note))
            )
    return found


def _is_recent(model: Architecture, sequence: int) -> bool:
    """Return whether a model is of 2023 or later: it has gated MLPs or long sequences."""
    return bool(model.gated) or sequence >= 8192


def _chunks(
    row: Row, layout: Mapping[str, float], model: Architecture, micro_batches: float
) -> list[int]:
    given, pp = count_of(row, "vpp"), int(layout["pp"])
    if given is not None or pp == 1:
        return [given or 1]
    if "1f1b" in _text(row) and "1f1b-i" not in _text(row):
        return [1]
    per_stage = model.layers // pp
    return [1] + [
        v
        for v in (2, 4)
        if per_stage % v == 0 and model.layers % (pp * v) == 0 and micro_batches >= pp
    ]


def _text(row: Row) -> str:
    return " ".join(
        row.get(key) or "" for key in ("framework", "notes", "zero_or_fsdp", "model_name")
    ).lower()


def _schedule(row: Row, pp: int, vpp: int) -> int:
    if pp == 1:
        return SCHEDULES.index("none")
    text = _text(row)
    if re.search(r"\bzb-?v\b|zbv", text):
        return SCHEDULES.index("zbv")
    if re.search(r"zb-?2p", text):
        return SCHEDULES.index("zbv")
    if re.search(r"zb-?(1p|h1)", text):
        return SCHEDULES.index("zb-h1")
    if "dualpipe" in text:
        return SCHEDULES.index("dualpipev")
    if "gpipe" in text:
        return SCHEDULES.index("gpipe")
    return SCHEDULES.index("interleaved" if vpp > 1 else "1f1b")


def count_of(row: Row, key: str) -> int | None:
    """Return a whole number of at least 1, or None for anything else."""
    number = number_of(row, key)
    return None if number is None else max(round(number), 1)


def number_of(row: Row, key: str) -> float | None:
    """Return the positive number at the start (`8192 (packed)`, `128k`), or None."""
    match = re.match(
        r"\s*(\d+(?:[.,]?\d+)*(?:e[+-]?\d+)?)\s*(k?)", str(row.get(key) or ""), re.IGNORECASE
    )
    if not match:
        return None
    try:
        value = float(match[1].replace(",", "")) * (1024 if match[2] else 1)
    except ValueError:  # several points: a version or a date
        return None
    return value if 0 < value < 1e15 else None


def _yes(row: Row, key: str) -> bool | None:
    value = (row.get(key) or "").strip().lower()
    return (
        True
        if value in ("y", "yes", "1", "true")
        else False
        if value in ("n", "no", "0", "false")
        else None
    )


def model_of(row: Row) -> Architecture:
    """Return the model of a row. Raises NotPriced if it is not modelled, or has no sizes."""
    text = _text(row)
    if "mamba" in text or "hybrid" in (row.get("moe") or ""):
        raise NotPriced(
            "the model mixes attention with other layers (Mamba), which is not modelled"
        )
    sizes = {
        key: count_of(row, column)
        for key, column in (("layers", "n_layers"), ("hidden", "hidden"), ("heads", "n_heads"))
    }
    known = models.named(
        re.sub(r"\s*\(.*?\)|\s+truncated.*|\s+w/.*", "", row.get("model_name") or "").strip()
    )
    if None in sizes.values():
        if known is None:
            missing = [name for name, value in sizes.items() if value is None]
            raise NotPriced(
                f"{', '.join(missing)} of the model not given, and {row.get('model_name') or 'it'} is not in the table"
            )
        layers = sizes["layers"] or known.layers  # some tables cut a model's layers
        return replace(known, layers=layers, dense_layers=min(known.dense_layers, layers))
    layers, hidden, heads = (int(sizes[name] or 0) for name in ("layers", "hidden", "heads"))
    kv_heads = count_of(row, "n_kv_heads") or heads
    gated = _yes(row, "gated_mlp")
    ffn = count_of(row, "ffn_hidden") or 4 * hidden
    billions = number_of(row, "n_params_B")
    vocab = count_of(row, "vocab") or (known.vocab if known is not None else 51200)
    gated_value = int(gated if gated is not None else "gpt" not in text)
    tied = _yes(row, "tied_emb")
    head_dim = _head_dim(row, known, hidden, heads)
    found = Architecture(
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        gated=gated_value,
        tied=int(bool(tied)),
        bias=1 - gated_value,
        qk_norm=int("qwen3" in re.sub(r"[- ]", "", (row.get("model_name") or "").lower())),
        name=row.get("model_name"),
    )
    if tied is None and billions is not None:
        both = {
            flag: abs(float(replace(found, tied=flag).parameters) - billions * 1e9)
            for flag in (0, 1)
        }
        found = replace(found, tied=min(both, key=lambda flag: both[flag]))
    if (row.get("moe") or "").strip() not in ("", "n", "0"):
        return _with_experts(row, found, known)
    return found


def _head_dim(row: Row, known: Architecture | None, hidden: int, heads: int) -> int:
    """Return the size of a head: of the row, of the known model of this width, or by division."""
    told = re.search(r"head[_ ](?:dim|size) (\d+)", row.get("model_name") or "")
    if (given := count_of(row, "head_dim") or (int(told[1]) if told else None)) is not None:
        return given
    same = known is not None and (int(known.hidden), int(known.heads)) == (hidden, heads)
    return (
        int(known.head_dim)
        if known is not None and same and not known.latent_rank
        else max(hidden // heads, 1)
    )


def _with_experts(row: Row, found: Architecture, known: Architecture | None) -> Architecture:
    if known is not None and known.experts:
        return known
    match = re.match(r"(\d+)\s*/\s*(\d+)(?:\s*\(\+(\d+)[^)]*\))?", row.get("moe") or "")
    if not match:
        raise NotPriced(
            f"experts {row.get('moe')!r} give neither their number nor how many a token uses"
        )
    count, active, shared = int(match[1]), int(match[2]), int(match[3] or 0)
    return replace(
        found, experts=count, active=active, expert_ffn=found.ffn, shared_ffn=shared * found.ffn
    )


def device_of(row: Row) -> DeviceSpec:
    """Return the device of a row with its network. Raises NotPriced for an unknown device."""
    try:
        found = hardware.device(row.get("gpu") or "")
    except InputError as error:
        raise NotPriced(str(error)) from None
    per_node = count_of(row, "gpus_per_node") or int(found.devices_per_node)
    domain = max(found.domain, per_node) if found.domain > found.devices_per_node else per_node
    found = replace(found, devices_per_node=per_node, domain=domain)
    nic = network_bandwidth(row.get("interconnect") or "", per_node)
    if nic:
        found = replace(found, nic_bandwidth=nic)
    return (
        replace(found, network_step=_EFA_STEP)
        if "efa" in (row.get("interconnect") or "").lower()
        else found
    )


_EFA_STEP = 100e-6
"""Seconds. On four nodes of eight, an all-reduce of 256 MB reaches half of the bandwidth and one of
16 MB an eighth (stas00/ml-engineering, network benchmarks)."""


def network_bandwidth(text: str, per_node: int) -> float | None:
    """Return the bytes/s per device of a description of a network, or None.

    >>> network_bandwidth("8x200Gbps HDR IB per node (Selene)", 8) / 1e9
    25.0
    """
    lower = text.lower()
    match = re.search(r"(\d+)\s*x\s*(\d+(?:\.\d+)?)\s*gb", lower)
    if match:
        return int(match[1]) * float(match[2]) / 8 / per_node * 1e9
    match = re.search(r"(\d+)\s*(?:x\s*)?omni-path", lower)
    if match:
        return int(match[1]) * 100 / 8 / per_node * 1e9
    match = re.search(r"(\d+(?:\.\d+)?)\s*tb(?:ps|/s|it)", lower)
    if match:
        return float(match[1]) * 1000 / 8 / per_node * 1e9
    match = re.search(r"(\d{3,4})\s*gb(?:ps|/s|it/s)?[^;,]*(?:/|per )\s*node", lower)
    if match:
        return float(match[1]) / 8 / per_node * 1e9
    return None


def precision_of(row: Row) -> tuple[int, str | None]:
    """Return the index into PRECISIONS, and a recipe of states if it is not the framework's."""
    written = (row.get("precision") or "").lower()
    text = (
        re.sub(r"\(.*?\)", "", written).strip() or written
    )  # in brackets is what the states or single operations have
    pure = "pure" in written or "pure bf16" in (row.get("notes") or "").lower()
    states = "pure-16bit" if pure else None
    if "fp4" in text:
        return PRECISIONS.index("fp4"), states
    if "fp8" in text or "mxfp8" in text or "float8" in text:
        return PRECISIONS.index("fp8"), states
    if "fp32" in text or "tf32" in text:
        return PRECISIONS.index("fp32"), "ddp-amp"
    if "fp16" in text or "v100" in (row.get("gpu") or "").lower():
        return PRECISIONS.index("fp16"), states
    return PRECISIONS.index("bf16"), states


def _layout(row: Row, model: Architecture) -> tuple[dict[str, float], list[str]]:
    assumed: list[str] = []
    gpus = count_of(row, "gpus_total")
    if gpus is None:
        raise NotPriced("gpus_total is not given")
    degrees: dict[str, int] = {}
    for axis in ("tp", "pp", "cp"):
        value = count_of(row, axis)
        if value is None and axis == "cp":
            value = 1
        if value is None:
            raise NotPriced(f"{axis} is not given")
        degrees[axis] = value
    product = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if gpus % product or product > gpus:
        raise NotPriced(f"tp x pp x cp = {product} does not divide {gpus} devices")
    dp = gpus // product
    if degrees["pp"] > model.layers + _STAGES_WITHOUT_LAYERS:
        raise NotPriced(f"{degrees['pp']} stages and {model.layers} layers")
    text = (row.get("zero_or_fsdp") or "").lower()
    stage, shard = _zero(text, dp)
    replicate = dp // shard if dp % shard == 0 else 1
    shard = dp // replicate
    if stage == 0:
        replicate, shard = dp, 1
    sp = _yes(row, "sp")
    share, kind, offloaded, noted = _recompute(row, model)
    assumed += noted
    return {
        **degrees,
        "sp": int(bool(sp) and degrees["tp"] > 1),
        "ep": count_of(row, "ep") or 1,
        "dp_replicate": replicate,
        "dp_shard": shard,
        "stage": stage,
        "recompute": kind,
        "every": 1 / share,
        "offload": float("cpu offload" in text and "activation" not in text),
        "offload_activations": offloaded,
    }, assumed


def _zero(text: str, dp: int) -> tuple[int, int]:
    """Return the ZeRO stage and the number of ranks that share states."""
    within = re.search(r"within (\d+)", text)
    shard = min(int(within[1]), dp) if within else dp
    if re.search(r"zero-?3|zero\+\+|full_shard|fsdp2|fsdp|gemini", text) and "grad_op" not in text:
        return 3, shard
    if re.search(r"zero-?2|grad_op", text):
        return 2, shard
    if re.search(r"zero-?1|distributed ?optimizer|zero1", text):
        return 1, shard
    if re.search(r"zero-?0|none|ddp", text):
        return 0, 1
    return (
        1 if dp > 1 else 0,
        shard,
    )  # tables that say nothing are of frameworks whose default it is


def _recompute(row: Row, model: Architecture) -> tuple[float, int, float, list[str]]:
    """Return share of layers, index into RECOMPUTE, share of offloaded activations, and notes."""
    text = (row.get("recompute") or "").lower()
    notes: list[str] = []
    offload = 0.5 if "activation offload" in text else 0.0
    full, none = RECOMPUTE.index("full"), RECOMPUTE.index("none")
    layers = re.search(r"(\d+) layers", text)
    if layers and not int(layers[1]):
        return 1.0, none, offload, notes
    if layers:
        return min(int(layers[1]) / model.layers, 1.0), full, offload, notes
    if "other layer" in text or "2nd" in text:
        return 0.5, full, offload, notes
    if "per-op" in text or "selectiveac" in text or "op-sac" in text:
        return 1.0, RECOMPUTE.index("operators"), offload, notes
    if "selective" in text and "none" not in text:
        return 1.0, RECOMPUTE.index("selective"), offload, notes
    if "full" in text or text in ("y", "yes"):
        return 1.0, full, offload, notes
    if not text:
        notes.append("no recomputation")
    return 1.0, none, offload, notes
