"""Random samples of everything that can be combined with long sequences and with experts.

The space of the first sample has kinds of context parallelism, documents and masks, ZeRO stages,
tensor and sequence parallelism, pipelines and their schedules, expert parallelism, and recompute.
The second sample adds MLPs in tiles, hybrid sharding, and states, parameters and activations in
files. Worker processes import this file.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

from tests.parity.experts import SIZES, Case, cases_of

SEED = 2020
COUNT = 320
ADDED_SEED = 2026
ADDED_COUNT = 80
DENSE = ("llama", "mistral", "gemma2", "gemma3_text")
WINDOWED = ("mistral", "gemma2", "gemma3_text", "mixtral")
"""Families in which a field of the configuration sets the window."""
CONTEXTS = ("all-gather-kv", "ring", "ulysses")
TWO_STAGES_PER_RANK = ("interleaved-1f1b", "interleaved-zero-bubble", "zbv")
TWO_PART_BACKWARD = ("interleaved-zero-bubble", "zbv")
SCHEDULES = ("1f1b", "gpipe", *TWO_STAGES_PER_RANK)

ADVERSARIAL: dict[str, tuple[Case, ...]] = {
    name: tuple(cases_of(text))
    for name, text in {
        "one valid token on one shard": """
            llama ring cp2 one_target
            mixtral cp2 ep2 balance one_target ulysses
            qwen3_moe zero1 cp2 ep2 dp2 one_target all-gather-kv
            deepseek_v3 zero3 cp2 ep2 dp2 one_target rate0.01 ring""",
        "a document across a border": """
            mistral cp4 packed window ring
            gemma3_text cp4 packed window all-gather-kv full
            mixtral cp2 tp2 ep2 balance packed ulysses sequence
            deepseek_v3 cp2 pp2 packed all-gather-kv""",
        "experts without a token": """
            mixtral zero3 ep2 dp2 balance unused padded
            qwen2_moe zero1 cp2 ep4 dp2 balance unused packed ring
            deepseek_v3 tp2 ep2 rate0.01 unused uneven sequence""",
        "all tokens to one expert": """
            mixtral zero2 cp2 ep4 dp2 balance one packed ulysses full
            qwen3_moe tp2 ep2 balance one padded sequence selective
            deepseek_v3 cp2 pp2 ep2 rate0.01 one one_target ring""",
        "an uneven sequence": """
            llama cp4 uneven all-gather-kv
            gemma2 zero3 cp2 dp2 uneven window ring selective
            mixtral cp2 tp2 balance uneven ulysses sequence""",
        "fewer key-value heads than ranks of cp": """
            llama cp2 kv1 packed ulysses
            llama cp4 kv2 uneven ulysses full
            mixtral cp4 ep4 kv1 balance border ulysses
            qwen3_moe cp4 kv1 balance causal ring""",
    }.items()
}
"""Cases by what is hard about them."""


_OFFLOADED: dict[str, tuple[str, ...]] = {
    "": (),
    "states": ("states",),
    "parameters": ("parameters",),
    "both": ("states, parameters",),
}
_ROUTED = {
    "spread": "by scores",
    "one": "all to one expert",
    "unused": "an expert without tokens",
}


def label(case):
    """Return the name of a case with the values of its settings."""
    settings = dict(case.settings)
    terms = [
        case.name,
        settings.get("context", ""),
        settings.get("pipeline", {}).get("schedule", ""),
        settings.get("recompute", {}).get("mode", ""),
        case.kind if case.family in SIZES else "",
    ]
    return " ".join(filter(None, terms))


def features(case):
    """Return the axes of the space, and the place of a case on each of them."""
    degrees = dict(case.degrees)
    settings = dict(case.settings)
    result = {
        "family": case.family,
        "processes": str(case.world),
        "context parallelism": "none",
        "rows": case.data.replace("_", " "),
        "window": "sliding" if case.window else "none",
        "ZeRO": f"stage {case.stage} over {case.dp}",
        "tensor parallelism": "none",
        "pipeline": "none",
        "experts on different processes": "no experts",
        "routing": "no experts",
        "losses of routers": _router_losses(case),
        "recomputation": settings.get("recompute", {}).get("mode", "none"),
        "MLP": "in tiles" if "mlp_tile_tokens" in settings else "all tokens at once",
        "sharding": "hybrid" if "dp_replicate" in settings else "over all or none",
        "in files": "nothing",
    }
    if "cp" in degrees:
        result["context parallelism"] = f"{settings['context']}, {degrees['cp']}"
    if "tp" in degrees:
        sequence = ", sequence parallelism" if "sequence_parallel" in settings else ""
        result["tensor parallelism"] = f"{degrees['tp']}{sequence}"
    if "pp" in degrees:
        schedule = settings.get("pipeline", {}).get("schedule", "1f1b")
        result["pipeline"] = f"{schedule}, {degrees['pp']}"
    if case.family in SIZES:
        result["experts on different processes"] = str(degrees.get("ep", 1))
        result["routing"] = _ROUTED[case.routed]
    offloaded = _OFFLOADED[case.offload]
    if "activation_offload" in settings:
        offloaded = (*offloaded, "activations")
    if offloaded:
        result["in files"] = " and ".join(offloaded)
    return result


def _router_losses(case):
    losses = []
    if case.balance:
        losses.append("balance")
    if case.z_loss:
        losses.append("z")
    text = " and ".join(losses) or "none"
    return f"global {text}" if case.balanced == "global" else text


def sampled(count=COUNT, seed=SEED):
    """Return different cases of the space, those of fewer ranks first."""
    random = Random(seed)
    result: dict[str, Case] = {}
    while len(result) < count:
        case = _drawn(random)
        if _fits(case):
            result.setdefault(label(case), case)
    return sorted(result.values(), key=lambda case: case.world)


def sampled_of_added(count=ADDED_COUNT, seed=ADDED_SEED):
    """Return different cases on at least one of the added axes, those of fewer ranks first.

    At least every second one has hybrid sharding or shards in files.
    """
    random = Random(seed)
    result: dict[str, Case] = {}
    while len(result) < count:
        base = _drawn(random)
        case = _with_added(random, base)
        offloads_with_context = case.offload and "cp" in dict(case.degrees)
        if case == base or offloads_with_context or not _fits(case):
            continue
        shards = case.offload or "dp_replicate" in dict(case.settings)
        if shards or len(result) % 2:
            result.setdefault(label(case), case)
    return sorted(result.values(), key=lambda case: case.world)


def _with_added(random, case):
    tokens = random.choice((0, 0, 1, 3, 5, 1000))
    settings = list(case.settings)
    shard = case.dp if case.stage else 1
    if tokens:
        settings.append(("mlp_tile_tokens", tokens))
    if case.stage and case.dp >= 4 and random.random() < 0.7:
        shard = case.dp // 2
        settings += [("dp_replicate", 2), ("dp_shard", shard)]
    if random.random() < 0.25:
        activations = {"fraction": 1, "device": "disk", "path": tempfile.gettempdir()}
        settings.append(("activation_offload", activations))
    offloads = ["", "", "states"]
    if case.stage == 3:
        offloads += ["parameters", "both"]
    offload: Any = random.choice(offloads)
    return replace(case, settings=tuple(settings), offload=offload if shard > 1 else "")


def _drawn(random):
    """Draw from the product of all axes, refused combinations included."""
    family = random.choice((*DENSE, *SIZES))
    experts = family in SIZES
    world = random.choice((2, 2, 4, 4, 4, 8))
    shapes = [
        (tp, cp, pp)
        for tp, cp, pp in product((1, 2, 4), (1, 2, 4), (1, 2))
        if world % (tp * cp * pp) == 0 and (cp > 1 or experts)
    ]
    tp, cp, pp = random.choice(shapes)
    ep = 1
    if experts:
        ep = random.choice((1, 2, 4))
    axes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}

    schedule = ""
    if pp > 1:
        schedule = random.choice(SCHEDULES)
    settings: list[tuple[str, Any]] = []
    if cp > 1:
        settings.append(("context", random.choice(CONTEXTS)))
    if tp > 1 and random.random() < 0.5:
        settings.append(("sequence_parallel", True))
    if schedule:
        settings.append(("pipeline", {"schedule": schedule}))
    recompute = random.choice(("", "full", "selective"))
    if recompute:
        settings.append(("recompute", {"mode": recompute}))
    if random.random() < 0.2:
        settings.append(("loss_chunk_tokens", 7))

    balance, balanced, z_loss = random.choice(
        (
            (False, "micro_batch", 0.0),
            (True, "micro_batch", 0.0),
            (True, "global", 0.0),
            (True, "micro_batch", 0.01),
        )
    )
    if not experts or family == "deepseek_v3":
        balance = False
        balanced = "micro_batch"
    if not experts:
        z_loss = 0.0

    # The order of the draws is part of the samples.
    stage = random.choice((0, 1, 2, 3))
    routed = "spread"
    if experts:
        routed = random.choice(("spread", "spread", "one", "unused"))
    rate = 0.0
    if family == "deepseek_v3" and random.random() < 0.5:
        rate = 0.01
    kind = random.choice(("eager", "batched_mm"))
    data = random.choice(
        ("ragged", "causal", "packed", "packed", "padded", "uneven", "one_target", "border")
    )
    kv_heads = 0
    if family in ("llama", "mixtral", "qwen3_moe") and tp == 1:
        kv_heads = random.choice((1, 2, 4))
    window = family in WINDOWED and random.random() < 0.5
    attention = "eager"
    if family not in ("gemma2", "gpt_oss"):
        attention = random.choice(("eager", "sdpa"))
    return Case(
        family,
        stage=stage,
        degrees=tuple((axis, degree) for axis, degree in axes.items() if degree > 1),
        balance=balance,
        routed=routed,
        rate=rate,
        settings=tuple(settings),
        dp=world // (tp * cp * pp),
        kind=kind,
        balanced=balanced,
        z_loss=z_loss,
        data=data,
        layers=4 if schedule in TWO_STAGES_PER_RANK else 0,
        kv_heads=kv_heads,
        window=window,
        attention=attention,
    )


def _fits(case):
    """Return whether a case is not refused. The refusals have tests of their own."""
    degrees = dict(case.degrees)
    settings = dict(case.settings)
    cp = degrees.get("cp", 1)
    tp = degrees.get("tp", 1)
    ep = degrees.get("ep", 1)
    two_part_backward = settings.get("pipeline", {}).get("schedule", "") in TWO_PART_BACKWARD
    rules = (
        case.dp * cp * tp % ep == 0,
        case.family != "qwen3_moe" or 6 % ep == 0,
        ep == 1 or not two_part_backward,
        settings.get("context") != "ulysses" or 4 // tp % cp == 0,
        # The reference computes one or the other.
        not (case.rate and case.z_loss),
        not ("cp" in degrees and case.family == "gpt_oss" and case.data == "packed"),
        case.stage < 3 or not two_part_backward,
    )
    return all(rules)
