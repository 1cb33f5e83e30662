"""One space of everything that long sequences and experts go with, and a sample of it that no person chose: kinds of context parallelism,
documents and masks, ZeRO stages, tensor and sequence parallelism, pipelines and their schedules, experts and where they are, recomputation;
and a second sample of what was added to it: MLPs in tiles, hybrid sharding, states, parameters and activations in files. Imported by
workers."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from random import Random
from typing import Any

from tests.parity.experts import SIZES, Case, cases_of

SEED, COUNT = 2020, 320
ADDED_SEED, ADDED_COUNT = 2026, 80
DENSE = ("llama", "mistral", "gemma2", "gemma3_text")
WINDOWED = ("mistral", "gemma2", "gemma3_text", "mixtral")
"""Families whose windows a configuration sets alone."""
CONTEXTS = ("all-gather-kv", "ring", "ulysses")
TWO_STAGES_A_RANK = ("interleaved-1f1b", "interleaved-zero-bubble", "zbv")
TWO_PART_BACKWARD = ("interleaved-zero-bubble", "zbv")
SCHEDULES = ("1f1b", "gpipe", *TWO_STAGES_A_RANK)

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
"""Named for what is hard about them."""


def label(case):
    """A case's name, with the values of its settings."""
    more = dict(case.more)
    pipeline, recompute = (
        more.get("pipeline", {}).get("schedule", ""),
        more.get("recompute", {}).get("mode", ""),
    )
    parts = [
        case.name,
        more.get("context", ""),
        pipeline,
        recompute,
        case.kind if case.family in SIZES else "",
    ]
    return " ".join(part for part in parts if part)


def features(case):
    """The axes of the space, and where on each a case is."""
    axes, more = dict(case.degrees), dict(case.more)
    stage, pipeline = f"stage {case.stage}", more.get("pipeline", {}).get("schedule", "1f1b")
    loss = (
        " and ".join(word for word, on in (("balance", case.balance), ("z", case.z_loss)) if on)
        or "none"
    )
    return {
        "family": case.family,
        "processes": str(case.world),
        "context parallelism": f"{more['context']}, {axes['cp']}" if "cp" in axes else "none",
        "rows": case.data.replace("_", " "),
        "window": "sliding" if case.window else "none",
        "ZeRO": f"{stage} over {case.dp}",
        "tensor parallelism": f"{axes['tp']}{', sequence parallelism' if 'sequence_parallel' in more else ''}"
        if "tp" in axes
        else "none",
        "pipeline": f"{pipeline}, {axes['pp']}" if "pp" in axes else "none",
        "experts on different processes": str(axes.get("ep", 1))
        if case.family in SIZES
        else "no experts",
        "routing": {
            "spread": "by scores",
            "one": "all to one expert",
            "unused": "an expert without tokens",
        }[case.routed]
        if case.family in SIZES
        else "no experts",
        "losses of routers": f"global {loss}" if case.balanced == "global" else loss,
        "recomputation": more.get("recompute", {}).get("mode", "none"),
        "MLP": "in tiles" if "mlp_tile_tokens" in more else "all tokens at once",
        "sharding": "hybrid" if "dp_replicate" in more else "over all or none",
        "in files": " and ".join(
            filter(
                None, (_FILES[case.offload], "activations" if "activation_offload" in more else "")
            )
        )
        or "nothing",
    }


_FILES = {"": "", "states": "states", "parameters": "parameters", "both": "states, parameters"}


def sampled(count=COUNT, seed=SEED):
    """Different cases of the space, those of fewer ranks first."""
    random, found = Random(seed), dict[str, Case]()
    while len(found) < count:
        case = _drawn(random)
        if _fits(case):
            found.setdefault(label(case), case)
    return sorted(found.values(), key=lambda case: case.world)


def sampled_of_added(count=ADDED_COUNT, seed=ADDED_SEED):
    """Different cases that have at least one of the dimensions that were added, every second one hybrid sharding or shards in files; those
    of fewer ranks first."""
    random, found = Random(seed), dict[str, Case]()
    while len(found) < count:
        drawn = _drawn(random)
        case = _with_added(random, drawn)
        shards = case.offload or "dp_replicate" in dict(case.more)
        if case == drawn or (case.offload and "cp" in dict(case.degrees)) or not _fits(case):
            continue
        if shards or len(found) % 2:
            found.setdefault(label(case), case)
    return sorted(found.values(), key=lambda case: case.world)


def everything():
    """Both samples, and what is adversarial."""
    return [
        *(case for group in ADVERSARIAL.values() for case in group),
        *sampled(),
        *sampled_of_added(),
    ]


def _with_added(random, case):
    tokens, more, shard = (
        random.choice((0, 0, 1, 3, 5, 1000)),
        list(case.more),
        case.dp if case.stage else 1,
    )
    more += [("mlp_tile_tokens", tokens)] if tokens else []
    if case.stage and case.dp >= 4 and random.random() < 0.7:
        shard = case.dp // 2
        more += [("dp_replicate", 2), ("dp_shard", shard)]
    if random.random() < 0.25:
        more.append(
            ("activation_offload", {"fraction": 1, "device": "disk", "path": tempfile.gettempdir()})
        )
    offload = random.choice(
        ("", "", "states", *(("parameters", "both") if case.stage == 3 else ()))
    )
    return replace(case, more=tuple(more), offload=offload if shard > 1 else "")  # type: ignore[arg-type]


def _drawn(random):
    """One of the product of all axes, refused combinations included."""
    family = random.choice((*DENSE, *SIZES))
    experts = family in SIZES
    world = random.choice((2, 2, 4, 4, 4, 8))
    shapes = [
        (tp, cp, pp, world // (tp * cp * pp))
        for tp in (1, 2, 4)
        for cp in (1, 2, 4)
        for pp in (1, 2)
        if world % (tp * cp * pp) == 0
    ]
    tp, cp, pp, dp = random.choice([shape for shape in shapes if shape[1] > 1 or experts])
    ep = random.choice((1, 2, 4)) if experts else 1
    degrees = tuple(
        (axis, degree)
        for axis, degree in (("tp", tp), ("cp", cp), ("pp", pp), ("ep", ep))
        if degree > 1
    )
    schedule = random.choice(SCHEDULES) if pp > 1 else ""
    more: list[tuple[str, Any]] = [("context", random.choice(CONTEXTS))] if cp > 1 else []
    more += [("sequence_parallel", True)] if tp > 1 and random.random() < 0.5 else []
    more += [("pipeline", {"schedule": schedule})] if schedule else []
    more += random.choice(
        ((), (("recompute", {"mode": "full"}),), (("recompute", {"mode": "selective"}),))
    )
    more += [("loss_chunk_tokens", 7)] if random.random() < 0.2 else []
    balance, balanced, z_loss = random.choice(
        (
            (False, "micro_batch", 0.0),
            (True, "micro_batch", 0.0),
            (True, "global", 0.0),
            (True, "micro_batch", 0.01),
        )
    )
    return Case(
        family,
        random.choice((0, 1, 2, 3)),
        degrees,
        balance and experts and family != "deepseek_v3",
        random.choice(("spread", "spread", "one", "unused")) if experts else "spread",
        0.01 if family == "deepseek_v3" and random.random() < 0.5 else 0.0,
        tuple(more),
        dp,
        kind=random.choice(("eager", "batched_mm")),
        balanced=balanced if balance and experts and family != "deepseek_v3" else "micro_batch",
        z_loss=z_loss if experts else 0.0,
        data=random.choice(
            ("ragged", "causal", "packed", "packed", "padded", "uneven", "one_target", "border")
        ),
        layers=4 if schedule in TWO_STAGES_A_RANK else 0,
        kv_heads=random.choice((1, 2, 4))
        if family in ("llama", "mixtral", "qwen3_moe") and tp == 1
        else 0,
        window=family in WINDOWED and random.random() < 0.5,
        attention="eager" if family in ("gemma2", "gpt_oss") else random.choice(("eager", "sdpa")),
    )


def _fits(case):
    """Whether it is not refused, by rules that are tests of their own."""
    axes = dict(case.degrees)
    ep, schedule = axes.get("ep", 1), dict(case.more).get("pipeline", {}).get("schedule", "")
    heads_here = 4 // axes.get("tp", 1)
    rules = (
        case.dp * axes.get("cp", 1) * axes.get("tp", 1) % ep == 0,
        case.family != "qwen3_moe" or 6 % ep == 0,
        ep == 1 or schedule not in TWO_PART_BACKWARD,
        dict(case.more).get("context") != "ulysses" or heads_here % axes.get("cp", 1) == 0,
        not (case.rate and case.z_loss),  # the reference computes one or the other
        not ("cp" in axes and case.family == "gpt_oss" and case.data == "packed"),
        case.stage < 3 or schedule not in TWO_PART_BACKWARD,
    )
    return all(rules)
