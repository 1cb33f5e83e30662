"""Training of models with experts and without, on layouts and in one process.

The reference uses Transformers' eager experts and its own loss. Worker processes import this file.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

import plait
from plait._torch.tensors import local_tensor
from plait.losses.loss import WeightedLoss
from plait.parallel.accounting.ledger import Ledger
from plait.parallel.order import account_all
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace, reference_trace
from tests.parity import cases, context_parallel
from tests.parity.data_parallel import CLIPPING, assert_same, training_config

STEPS = 2
Routed = Literal["spread", "one", "unused"]
"""How routers choose: by large scores; expert 0 for all tokens; never expert 1."""
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
    """A model on a layout.

    Attributes:
        settings: Further settings of `parallel`.
        kind: Implementation of the experts.
        data: Rows of `context_parallel`, or rows of different lengths with one micro-batch that
            has no targets.
        layers: Number of layers, or 0 for that of `SIZES`.
        kv_heads: Number of key-value heads, or 0 for that of `SIZES`.
        window: Whether attention slides over fewer tokens than a rank has of a sequence.
        offload: Which tensors the optimizer and ZeRO keep on `offload_to`.
        adapted: Parameters of experts with LoRA adapters, which train alone, together with
            adapters of the attention's output.
    """

    family: str
    stage: int = 0
    degrees: tuple[tuple[str, Any], ...] = ()
    balance: bool = False
    routed: Routed = "spread"
    rate: float = 0.0
    settings: tuple[tuple[str, Any], ...] = ()
    dp: int = 1
    mask: bool = True
    kind: str = "eager"
    balanced: Literal["micro_batch", "global"] = "micro_batch"
    z_loss: float = 0.0
    data: context_parallel.Data | Literal["ragged"] = "ragged"
    layers: int = 0
    kv_heads: int = 0
    window: bool = False
    attention: Literal["eager", "sdpa"] = "eager"
    offload: Literal["", "states", "parameters", "both"] = ""
    offload_to: Literal["nvme", "cpu"] = "nvme"
    adapted: tuple[str, ...] = ()

    @property
    def world(self):
        """Number of processes."""
        degrees = dict(self.degrees)
        return self.dp * math.prod(degrees.get(axis, 1) for axis in ("tp", "pp", "cp"))

    @property
    def name(self):
        """Name for a test's id."""
        degrees = [f"{axis}{size}" for axis, size in self.degrees]
        terms = [self.family, f"dp{self.dp}", *degrees, f"zero{self.stage}", self.routed]
        switches = {
            "balance": self.balance,
            "global": self.balanced == "global",
            "z": self.z_loss,
            "bias": self.rate,
            "unmasked": not self.mask,
            "window": self.window,
            "sdpa": self.attention == "sdpa",
            f"layers{self.layers}": self.layers,
            f"kv{self.kv_heads}": self.kv_heads,
            "adapted": self.adapted,
            f"{self.offload} on {self.offload_to}": self.offload,
            self.data: self.data != "ragged",
        }
        terms += [word for word, on in switches.items() if on]
        terms += [key for key, _ in self.settings]
        return "-".join(terms)


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
    "budget": (("recompute", {"budget_gib": 1, "sequence_length": 16}),),
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
_COUNTS = {"tile": "mlp_tile_tokens", "chunk": "loss_chunk_tokens", "overlap": "tensor_overlap"}


def case_of(text):
    """Return the case that a text describes: `mixtral zero3 dp2 cp2 ep2 balance one ring tile3`."""
    family, *terms = text.split()
    fields: dict[str, Any] = {"family": family, "degrees": (), "settings": ()}
    for word in terms:
        name = word.rstrip("0123456789.")
        number = word[len(name) :]
        if word in _SWITCHES:
            fields |= _SWITCHES[word]
        elif word in _SETTINGS:
            fields["settings"] += _SETTINGS[word]
        elif name in ("tp", "cp", "pp", "ep"):
            fields["degrees"] += ((name, int(number)),)
        elif name in _NUMBERS:
            fields[_NUMBERS[name]] = float(number) if "." in number else int(number)
        else:
            fields["settings"] += ((_COUNTS[name], int(number)),)
    return Case(**fields)


def cases_of(text):
    """Return a case for each line."""
    return [case_of(line) for line in text.strip().splitlines()]


def configured(case):
    """Return a configuration file as a user would write it."""
    device = {"device": "cpu"}
    if case.offload_to == "nvme":
        device = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
    zero: dict[str, Any] = {"stage": case.stage}
    if case.offload in ("states", "both"):
        zero["offload_optimizer"] = device
    if case.offload in ("parameters", "both"):
        zero["offload_param"] = device
    return training_config(
        {**dict(case.degrees), **dict(case.settings)},
        zero_optimization=zero,
        experts={"bias_update_rate": case.rate, "balance": case.balanced, "z_loss": case.z_loss},
    )


def build(case, *, dtype=torch.float64, device="cpu"):
    """Build the model, with the same weights on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    experts = {"experts_implementation": case.kind} if case.family in SIZES else {}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            model_config(case), attn_implementation=case.attention, **experts
        ).to(dtype)
    if device == "cpu":
        _enlarge(model)
    if case.adapted:
        model = with_adapters(model, case.adapted)
    if case.routed != "spread":
        for router in routers(model):
            router.register_forward_hook(all_to_first if case.routed == "one" else never_to_second)
    return model.train()


def _enlarge(model):
    """Enlarge weights whose initial values are so small that an error in them would not show."""
    factors = {".gate.weight": 20, ".router.weight": 20, ".sinks": 50}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            suffix = next((suffix for suffix in factors if name.endswith(suffix)), None)
            if suffix is not None:
                parameter.mul_(factors[suffix])
            elif "experts" in name:
                parameter.mul_(4)


def with_adapters(model, parameters):
    """Put LoRA adapters on parameters of the experts and on the output of the attention."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    config = LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["o_proj"],
        target_parameters=[f"experts.{name}" for name in parameters],
    )
    adapted = get_peft_model(model, config)
    # PEFT starts with B = 0, for which the gradient of A is zero and would not be compared.
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def model_config(case):
    """Return Transformers' configuration of the model."""
    from transformers import AutoConfig

    if case.family not in SIZES:
        config = cases.transformers_config(case.family, tied=False, layers=case.layers or None)
        if case.kv_heads:
            config.num_key_value_heads = case.kv_heads
    else:
        fields = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, **SIZES[case.family]}
        if case.layers:
            fields["num_hidden_layers"] = case.layers
        if case.kv_heads:
            fields["num_key_value_heads"] = case.kv_heads
        config = AutoConfig.for_model(case.family, vocab_size=cases.VOCABULARY, **fields)
        config.output_router_logits = case.balance
    if case.window:
        config.sliding_window = context_parallel.WINDOW
    config.use_cache = False
    return config


def routers(model):
    """Return the modules that choose experts."""
    suffixes = ("TopKRouter", "TopkRouter")
    return [module for module in model.modules() if type(module).__name__.endswith(suffixes)]


def all_to_first(module, args, output):
    """Send all tokens to expert 0. A forward hook of a router."""
    logits, weights, chosen = output
    return logits, weights, torch.zeros_like(chosen)


def never_to_second(module, args, output):
    """Send the tokens of expert 1 to expert 0. A forward hook of a router."""
    logits, weights, chosen = output
    return logits, weights, torch.where(chosen == 1, 0, chosen)


def balanced(module, args, output):
    """Send every expert the same number of tokens of each rank. A forward hook of a router."""
    logits, weights, chosen = output
    even = torch.arange(chosen.numel()).view_as(chosen) % logits.shape[-1]
    return logits, weights, even


def steps(case, micro_batches):
    """Return steps of micro-batches with different lengths and numbers of targets."""
    if case.data != "ragged":
        return context_parallel.steps(case.data, micro_batches)
    keys = ("attention_mask",) if case.mask else ()
    return cases.ragged_steps(micro_batches, steps=STEPS, keys=keys)


def biases(model):
    """Return copies of the buffers that `experts.bias_update_rate` updates."""
    return {
        name: buffer.clone()
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }


def train(rank, world, case):
    """Return the trace and the router biases of a run. Runs on every rank."""
    model = build(case)
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        trace = engine_trace(engine, steps(case, 2 * engine.dp_size))
        # Tokens of an evaluation must not count for the biases.
        engine.eval_batch(steps(case, 2)[0][0])
    return trace, biases(model)


class Account(NamedTuple):
    """Bytes of one rank: what it sent in a step and holds after it, and the ledger's numbers.

    Memory is a pair: bytes of the parameters and of the optimizer states.
    """

    sent: dict[str, int]
    predicted_sent: dict[str, int]
    memory: tuple[int, ...]
    predicted_memory: tuple[int, ...]


def account_of(engine, facts, traffic, rank):
    """Return the account of an engine after a step with 2 x 16 tokens per micro-batch."""
    layout = engine.mesh.layout
    start = Ledger.of_rank(layout, layout.coordinates(rank), accumulation=2, tokens=2 * 16)
    ledger = account_all(engine.config.techniques, start, facts)
    parameters = 0
    for parameter in engine.model.parameters():
        parameters += local_tensor(parameter.detach()).untyped_storage().nbytes()
    states = 0
    for state in engine.optimizer.state.values():
        states += sum(local_tensor(value).nbytes for value in state.values())
    return Account(
        sent={kind: count for kind, count in traffic.items() if kind != "control"},
        predicted_sent={kind: int(count[0]) for kind, count in ledger.traffic.items() if count[0]},
        memory=(parameters, states),
        predicted_memory=tuple(int(ledger.memory[kind][0]) for kind in ("parameters", "optimizer")),
    )


def carried_over(first, second, folder):
    """Exchange the checkpoints of two engines and compare their next steps.

    Args:
        first: An engine and the batch of its rank.
        second: An engine on another layout and the batch of its rank.
        folder: Folder for the checkpoints.

    Returns:
        Differences of the losses and norms between the engine that saved and the one that loaded,
        in both directions.
    """
    differences = []
    for number, (saver, loader) in enumerate(((first, second), (second, first))):
        saving_engine, saving_batch = saver
        loading_engine, loading_batch = loader
        saving_engine.save_checkpoint(f"{folder}/{number}")
        expected = saving_engine.train_batch(saving_batch)
        loading_engine.load_checkpoint(f"{folder}/{number}")
        actual = loading_engine.train_batch(loading_batch)
        differences.append(float(actual) - float(expected))
        differences.append(float(actual.grad_norm) - float(expected.grad_norm))
    return differences


def reference(case):
    """Return the trace and the biases of one plain process on the same global batches."""
    alone = replace(case, stage=0, degrees=(), settings=(), dp=1, kind="eager", offload="")
    if case.z_loss or case.balanced == "global":
        return _reference_with_router_losses(alone, case.dp), biases(build(alone))
    return _reference(alone, 2 * case.dp)


@cache
def _reference_with_router_losses(case, dp):
    """Return the trace of one process that computes the routers' losses in plain torch.

    Losses are formed over the micro-batches that ranks compute at the same time: over all of them
    with `balanced` "global", and per micro-batch otherwise.
    """
    model = build(case)
    balance_weight = float(getattr(model, "router_aux_loss_coef", 0)) * case.balance
    router_logits: list[torch.Tensor] = []
    for router in routers(model):
        router.register_forward_hook(lambda module, args, output: router_logits.append(output[0]))

    def forward(module, group):
        outputs = []
        for batch in group:
            router_logits.clear()
            logits = module(**{**batch, "labels": None}).logits
            outputs.append((logits, list(router_logits)))
        return outputs

    def weight(group):
        return sum(map(targets, group))

    def total(outputs, group):
        entropy = torch.zeros((), dtype=torch.float64)
        masks = []
        for (logits, _), batch in zip(outputs, group, strict=True):
            entropy = entropy + torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            masks.append(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten())
        mask = torch.cat(masks).bool()

        # Logits of the tokens that are not padding, per router: [tokens, experts].
        per_router = zip(*(logits for _, logits in outputs), strict=True)
        layers = [torch.cat(logits)[mask] for logits in per_router]
        z = sum(layer.logsumexp(-1).square().mean() for layer in layers)
        balance = 0
        if balance_weight:
            experts = routers(model)[0].num_experts
            balance = balance_loss(layers, experts, model.config.num_experts_per_tok)
        count = weight(group)
        return entropy + count * (balance_weight * balance + case.z_loss * z), count

    def groups(step):
        if case.balanced == "global":
            return [step[index::2] for index in range(2)]
        return [[batch] for batch in step]

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
    tokens_per_expert: dict[nn.Module, torch.Tensor] = {}
    masks: list[torch.Tensor | None] = [None]

    def remember_mask(module, args, kwargs):
        masks[0] = kwargs.get("attention_mask")

    def count_tokens(module, args, output):
        experts = len(module.e_score_correction_bias)
        chosen = output[2]
        if masks[0] is not None:
            chosen = chosen[masks[0].flatten().bool()]
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        tokens_per_expert[module] = tokens_per_expert.get(module, 0) + counts

    def update_biases():
        for router, counts in tokens_per_expert.items():
            direction = torch.sign(counts.double().mean() - counts)
            router.e_score_correction_bias.add_(case.rate * direction)
        tokens_per_expert.clear()

    if case.rate:
        model.register_forward_pre_hook(remember_mask, with_kwargs=True)
        for router in routers(model):
            router.register_forward_hook(count_tokens)
    with keeping_float64(model):
        trace = reference_trace(
            model,
            steps(case, micro_batches),
            loss_fn=WeightedLoss(transformers_loss, targets),
            optimizer=lambda parameters: _AdamWWithCallback(parameters, update_biases),
            clipping=CLIPPING,
            forward=lambda module, batch: module(**batch),
        )
    return trace, biases(model)


def balance_loss(layers, experts, top_k):
    """Compute Transformers' balance loss, in the dtypes of its own function."""
    weights = torch.cat(layers).softmax(-1)
    counts = torch.bincount(weights.topk(top_k).indices.flatten(), minlength=experts).float()
    tokens = counts / torch.tensor(len(weights)).float()
    return (tokens * weights.sum(0) / len(weights)).sum() * experts


def transformers_loss(output, batch):
    """Return the sum that belongs to Transformers' mean loss, balance loss included."""
    count = targets(batch)
    return (output.loss * count, count) if count else (output.logits.sum() * 0, 0)


def targets(batch):
    """Return the number of targets of a micro-batch."""
    return int((batch["labels"][:, 1:] != -100).sum())


class _AdamWWithCallback(torch.optim.AdamW):
    """The optimizer of `cases` with a function that runs after each step."""

    def __init__(self, parameters, callback):
        super().__init__(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
        self.callback = callback

    def step(self, closure=None):
        result = super().step(closure)
        self.callback()
        return result


def assert_equal(case, results):
    """Compare losses, gradients, norms, weights and biases to 1e-10.

    Returns the largest deviation.
    """
    expected, expected_biases = reference(case)
    compared: set[str] = set()
    errors = [0.0]
    for trace, rank_biases in results:
        errors.append(assert_same(expected, trace, where=case.name))
        # A pipeline stage has the biases of its own layers only.
        for name, bias in rank_biases.items():
            torch.testing.assert_close(bias, expected_biases[name], rtol=0, atol=1e-12)
            compared.add(name)
    assert compared == set(expected_biases)
    return max(errors)
