"""Training of models with experts and without, and the same in one process with Transformers' eager experts and its own loss. Imported
by workers."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

import plait
from plait._torch.tensors import local_tensor
from plait.engine.engine import Engine
from plait.losses.loss import WeightedLoss
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import Trace, compare, engine_trace, reference_trace, worst
from tests.parity import cases, context_parallel

CLIPPING, STEPS = 0.5, 2
Routed = Literal["spread", "one", "unused"]
"""Where tokens go: by large scores; all to expert 0; never to expert 1."""
LLAMA_LIKE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {
        **LLAMA_LIKE,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.05,
        "sliding_window": None,
    },
    "qwen2_moe": {
        **LLAMA_LIKE,
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.05,
    },
    "qwen3_moe": {
        **LLAMA_LIKE,
        "num_hidden_layers": 3,
        "intermediate_size": 40,
        "moe_intermediate_size": 20,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "router_aux_loss_coef": 0.05,
    },
    "deepseek_v3": {
        "hidden_size": 32,
        "intermediate_size": 40,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "gpt_oss": {
        **LLAMA_LIKE,
        "intermediate_size": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
}


@dataclass(frozen=True)
class Case:
    """A model with experts on a layout."""

    family: str
    stage: int = 0
    degrees: tuple[tuple[str, Any], ...] = ()
    balance: bool = False
    routed: Routed = "spread"
    rate: float = 0.0
    more: tuple[tuple[str, Any], ...] = ()
    dp: int = 1
    mask: bool = True
    kind: str = "eager"
    balanced: Literal["micro_batch", "global"] = "micro_batch"
    z_loss: float = 0.0
    data: context_parallel.Data | Literal["ragged"] = "ragged"
    """Rows of 16 tokens or so, as for parts of sequences; or of different lengths, with a micro-batch without targets."""
    layers: int = 0
    """Of the model; 0: as many as its sizes say."""
    kv_heads: int = 0
    """The same for key-value heads."""
    window: bool = False
    """Of sliding attention, shorter than a part of a sequence."""
    attention: Literal["eager", "sdpa"] = "eager"
    offload: Literal["", "states", "parameters", "both"] = ""
    """What of the optimizer and of ZeRO's shards is elsewhere."""
    offload_to: Literal["nvme", "cpu"] = "nvme"
    """In files in the folder for temporary ones, or in the host's memory."""
    adapted: tuple[str, ...] = ()
    """Parameters of experts with low-rank adapters of PEFT, which alone train together with those of the attention."""

    @property
    def world(self):
        """Processes."""
        product = self.dp
        for axis in ("tp", "pp", "cp"):
            product *= int(dict(self.degrees).get(axis, 1))
        return product

    @property
    def name(self):
        """For a test's id."""
        parts = [
            self.family,
            f"dp{self.dp}",
            *(f"{axis}{size}" for axis, size in self.degrees),
            f"zero{self.stage}",
            self.routed,
        ]
        said = (
            ("balance", self.balance),
            ("global", self.balanced == "global"),
            ("z", self.z_loss),
            ("bias", self.rate),
        )
        parts += [
            word
            for word, on in (
                *said,
                ("unmasked", not self.mask),
                ("window", self.window),
                ("sdpa", self.attention == "sdpa"),
            )
            if on
        ]
        parts += [
            f"{name}{count}"
            for name, count in (("layers", self.layers), ("kv", self.kv_heads))
            if count
        ]
        parts += ["adapted"] if self.adapted else []
        parts += [f"{self.offload} on {self.offload_to}"] if self.offload else []
        parts += [self.data] if self.data != "ragged" else []
        return "-".join([*parts, *(key for key, _ in self.more)])


_SWITCHES: dict[str, dict[str, Any]] = {
    "balance": {"balance": True},
    "global": {"balanced": "global"},
    "unmasked": {"mask": False},
    "window": {"window": True},
    "batched_mm": {"kind": "batched_mm"},
    "adapted": {"adapted": ("gate_up_proj", "down_proj")},
    **{word: {"routed": word} for word in ("one", "unused")},
    **{word: {"offload": word} for word in ("states", "parameters", "both")},
    **{word: {"data": word} for word in get_args(context_parallel.Data)},
}
_SETTINGS: dict[str, tuple[tuple[str, Any], ...]] = {
    **{word: (("context", word),) for word in ("ring", "ulysses", "all-gather-kv")},
    **{word: (("recompute", {"mode": word}),) for word in ("full", "selective")},
    **{
        word: (("pipeline", {"schedule": word}),)
        for word in ("gpipe", "zbv", "interleaved-1f1b", "interleaved-zero-bubble")
    },
    "sequence": (("sequence_parallel", True),),
    "hybrid": (("dp_replicate", 2), ("dp_shard", 2)),
    "files": (
        ("activation_offload", {"fraction": 1, "device": "disk", "path": tempfile.gettempdir()}),
    ),
}
_NUMBERS = {
    "zero": "stage",
    "dp": "dp",
    "layers": "layers",
    "kv": "kv_heads",
    "rate": "rate",
    "z": "z_loss",
}


def case_of(text):
    """Return the case that words describe: `mixtral zero3 dp2 cp2 ep2 balance one ring tile3`."""
    family, *words = text.split()
    fields: dict[str, Any] = {"family": family, "degrees": (), "more": ()}
    for word in words:
        name, number = (
            re.fullmatch(r"([^\d.]*)([\d.]*)", word).groups() if word[-1].isdigit() else (word, "")
        )  # type: ignore[union-attr]
        if word in _SWITCHES:
            fields |= _SWITCHES[word]
        elif word in _SETTINGS:
            fields["more"] += _SETTINGS[word]
        elif name in ("tp", "cp", "pp", "ep"):
            fields["degrees"] += ((name, int(number)),)
        elif name in _NUMBERS:
            fields[_NUMBERS[name]] = float(number) if "." in number else int(number)
        else:
            settings = {
                "tile": "mlp_tile_tokens",
                "chunk": "loss_chunk_tokens",
                "overlap": "tensor_overlap",
            }
            fields["more"] += ((settings[name], int(number)),)
    return Case(**fields)


def cases_of(text):
    """Return a case for each line."""
    return [case_of(line) for line in text.strip().splitlines()]


def configured(case):
    """A configuration file as a user would write it."""
    there = (
        {"device": "nvme", "nvme_path": tempfile.gettempdir()}
        if case.offload_to == "nvme"
        else {"device": "cpu"}
    )
    offloads = {
        "states": ("offload_optimizer",),
        "parameters": ("offload_param",),
        "both": ("offload_optimizer", "offload_param"),
    }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {
            "stage": case.stage,
            **dict.fromkeys(offloads.get(case.offload, ()), there),
        },
        "optimizer": cases.OPTIMIZER,
        "parallel": {**dict(case.degrees), **dict(case.more)},
        "experts": {"bias_update_rate": case.rate, "balance": case.balanced, "z_loss": case.z_loss},
    }


def build(case, *, dtype=torch.float64, device="cpu"):
    """With real weights, the same on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = model_config(case)
    experts = {"experts_implementation": case.kind} if case.family in SIZES else {}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=case.attention, **experts
        ).to(dtype)
    if device == "cpu":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith((".gate.weight", ".router.weight")):
                    parameter.mul_(20)
                elif "experts" in name:
                    parameter.mul_(4)
                elif name.endswith(".sinks"):
                    parameter.mul_(50)
    if case.adapted:
        model = with_adapters(model, case.adapted)
    for router in routers(model):
        if case.routed != "spread":
            router.register_forward_hook(all_to_first if case.routed == "one" else never_to_second)
    return model.train()


def with_adapters(model, parameters):
    """PEFT's adapters on parameters and on the output of the attention, with B that is not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    config = LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["o_proj"],
        target_parameters=[f"experts.{name}" for name in parameters],
    )
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def model_config(case):
    """Transformers' configuration."""
    from transformers import AutoConfig

    if case.family not in SIZES:
        config = cases.transformers_config(case.family, tied=False, layers=case.layers or None)
        if case.kv_heads:
            config.num_key_value_heads = case.kv_heads
    else:
        sizes = {**SIZES[case.family]}
        sizes |= {
            key: value
            for key, value in (
                ("num_hidden_layers", case.layers),
                ("num_key_value_heads", case.kv_heads),
            )
            if value
        }
        tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        config = AutoConfig.for_model(case.family, vocab_size=cases.VOCABULARY, **tokens, **sizes)
        config.output_router_logits = case.balance
    if case.window:
        config.sliding_window = context_parallel.WINDOW
    config.use_cache = False
    return config


def routers(model):
    """Modules that choose experts."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter"))
    ]


def all_to_first(module, args, output):
    """A hook of a router."""
    logits, weights, chosen = output
    return logits, weights, torch.zeros_like(chosen)


def never_to_second(module, args, output):
    """A hook of a router."""
    logits, weights, chosen = output
    return logits, weights, torch.where(chosen == 1, 0, chosen)


def balanced(module, args, output):
    """A hook of a router: every expert gets as many tokens from every rank."""
    logits, weights, chosen = output
    even = torch.arange(chosen.numel()).view_as(chosen) % logits.shape[-1]
    return logits, weights, even


def steps(case, micro_batches):
    """Micro-batches of other lengths and numbers of targets; of `ragged` ones, one has none."""
    if case.data != "ragged":
        return context_parallel.steps(case.data, micro_batches)
    keys = ("attention_mask",) if case.mask else ()
    return cases.ragged_steps(micro_batches, steps=STEPS, keys=keys)


def biases(model):
    """Copies of what `experts.bias_update_rate` updates."""
    return {
        name: buffer.clone()
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }


Result = tuple[Trace, dict[str, torch.Tensor]]


def train(rank, world, case):
    """Runs in a worker."""
    model = build(case)
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        trace = engine_trace(engine, steps(case, 2 * engine.dp_size))
        engine.eval_batch(steps(case, 2)[0][0])  # tokens of an evaluation are not counted
    return trace, biases(model)


class Account(NamedTuple):
    """Of one step: what a rank sent and what it was said to send, and bytes of (parameters, states of the optimizer)."""

    sent: dict[str, int]
    said: dict[str, int]
    held: tuple[int, int]
    said_held: tuple[int, ...]


def account_of(engine, facts, traffic, rank):
    """Of an engine that has trained a step on 2 x 16 tokens a micro-batch, and of the ledger."""
    layout = engine.mesh.layout
    start = Ledger.of_rank(layout, layout.coordinates(rank), accumulation=2, tokens=2 * 16)
    ledger = account_all(engine.config.techniques, start, facts)
    parameters = sum(
        local_tensor(p.detach()).untyped_storage().nbytes() for p in engine.model.parameters()
    )
    states = sum(
        local_tensor(v).nbytes for state in engine.optimizer.state.values() for v in state.values()
    )
    sent = {kind: count for kind, count in traffic.items() if kind != "control"}
    said = {kind: int(count[0]) for kind, count in ledger.traffic.items() if count[0]}
    return Account(
        sent,
        said,
        (parameters, states),
        tuple(int(ledger.memory[kind][0]) for kind in ("parameters", "optimizer")),
    )


Trained = tuple[Engine, dict[str, torch.Tensor]]
"""An engine, and the batch of its rank."""


def carried_over(one, other, folder):
    """What the next step's losses and norms differ by after the checkpoint of each engine was loaded by the other."""
    found = []
    for (saver, given), (loader, read) in ((one, other), (other, one)):
        saver.save_checkpoint(f"{folder}/{len(found)}")
        expected = saver.train_batch(given)
        loader.load_checkpoint(f"{folder}/{len(found)}")
        after = loader.train_batch(read)
        found += [
            float(after) - float(expected),
            float(after.grad_norm) - float(expected.grad_norm),
        ]
    return found


def reference(case):
    """Of the same global batches."""
    alone = replace(case, stage=0, degrees=(), more=(), dp=1, kind="eager", offload="")
    if case.z_loss or case.balanced == "global":
        return _reference_of_routers(alone, case.dp), biases(build(alone))
    return _reference(alone, 2 * case.dp)


@cache
def _reference_of_routers(case, dp):
    """The losses of routers in plain torch, over the micro-batches that ranks compute at the same time: of all, or one after the other."""
    model, everyone = build(case), case.balanced == "global"
    coefficient, experts = (
        float(getattr(model, "router_aux_loss_coef", 0)) * case.balance,
        routers(model)[0].num_experts,
    )
    seen: list[torch.Tensor] = []
    for router in routers(model):
        router.register_forward_hook(lambda module, args, output: seen.append(output[0]))

    def forward(module, group):
        found = []
        for batch in group:
            seen.clear()
            found.append((module(**{**batch, "labels": None}).logits, list(seen)))
        return found

    def total(outputs, group):
        entropies = [
            torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            for (logits, _), batch in zip(outputs, group, strict=True)
        ]
        layers = [
            torch.cat(layer) for layer in zip(*(logits for _, logits in outputs), strict=True)
        ]
        mask = torch.cat(
            [
                batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten()
                for batch in group
            ]
        )
        z = torch.stack(
            [layer.logsumexp(-1).square()[mask.bool()].mean() for layer in layers]
        ).sum()
        balance = (
            balance_loss(
                [layer[mask.bool()] for layer in layers], experts, model.config.num_experts_per_tok
            )
            if coefficient
            else 0
        )
        count = weight(group)
        return torch.stack(entropies).sum() + count * (
            coefficient * balance + case.z_loss * z
        ), count

    def weight(group):
        return sum(map(targets, group))

    def groups(step):
        return [step[index::2] for index in range(2)] if everyone else [[batch] for batch in step]

    with keeping_float64(model):
        return reference_trace(
            model,
            [groups(step) for step in steps(case, 2 * dp)],
            loss_fn=WeightedLoss(total, weight),
            optimizer=cases.adamw,
            clipping=CLIPPING,
            forward=forward,
        )


@cache
def _reference(case, micro_batches):
    model = build(case)
    counts: dict[nn.Module, torch.Tensor] = {}
    masks: list[torch.Tensor | None] = [None]

    def note(module, args, kwargs):
        masks[0] = kwargs.get("attention_mask")

    def count(module, args, output):
        experts, chosen = len(module.e_score_correction_bias), output[2]
        if masks[0] is not None:
            chosen = chosen[masks[0].flatten().bool()]
        counts[module] = counts.get(module, torch.zeros(experts)) + torch.bincount(
            chosen.flatten(), minlength=experts
        )

    if case.rate:
        model.register_forward_pre_hook(note, with_kwargs=True)
        for router in routers(model):
            router.register_forward_hook(count)

    def move():
        for router, found in counts.items():
            for expert, tokens in enumerate(found.tolist()):
                mean = float(found.sum()) / len(found)
                router.e_score_correction_bias[expert] += case.rate * (
                    (tokens < mean) - (tokens > mean)
                )
        counts.clear()

    with keeping_float64(model):
        trace = reference_trace(
            model,
            steps(case, micro_batches),
            loss_fn=WeightedLoss(transformers_loss, targets),
            optimizer=lambda parameters: Updating(parameters, move),
            clipping=CLIPPING,
            forward=lambda module, batch: module(**batch),
        )
    return trace, biases(model)


def balance_loss(layers, experts, top_k):
    """Transformers' formula, in the dtypes of its own function."""
    weights = torch.cat(layers).softmax(-1)
    tokens = (
        torch.bincount(weights.topk(top_k).indices.flatten(), minlength=experts).float()
        / torch.tensor(len(weights)).float()
    )
    return (tokens * weights.sum(0) / len(weights)).sum() * experts


def transformers_loss(output, batch):
    """What Transformers computes from labels, balance loss included, as often as there are targets."""
    count = targets(batch)
    return (output.loss * count, count) if count else (output.logits.sum() * 0, 0)


def targets(batch):
    """Of a micro-batch."""
    return int((batch["labels"][:, 1:] != -100).sum())


class Updating(torch.optim.AdamW):
    """The optimizer of `cases`, after which `after` runs."""

    def __init__(self, parameters, after):
        super().__init__(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        self.after = after

    def step(self, closure=None):
        found = super().step(closure)
        self.after()
        return found


def assert_equal(case, results):
    """Losses, gradients, norms, weights and biases to 1e-10. Returns the largest deviation."""
    expected, moved = reference(case)
    seen: set[str] = set()
    errors = [0.0]
    for trace, found in results:
        bar = worst(compare(expected, trace))
        assert bar.ok(1e-10), f"{case.name}: {bar.name}: {bar.error}"
        errors.append(bar.error)
        for name, bias in found.items():  # a pipeline stage has its own
            torch.testing.assert_close(bias, moved[name], rtol=0, atol=1e-12)
            seen.add(name)
    assert seen == set(moved)
    return max(errors)
