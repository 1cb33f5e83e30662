"""Training with context parallelism, and the same in one process. Worker processes import it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

import plait
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.parity import adapted, cases
from tests.parity.data_parallel import SEED as SEED
from tests.parity.data_parallel import (
    assert_same,
    materialise_model,
    plain_trace,
    training_config,
)

STEPS = 2
WINDOW = 5
Data = Literal["causal", "packed", "padded", "uneven", "one_target", "border"]
"""Rows of a batch.

- causal: full rows
- packed: several documents, one of them over a border between the parts of two ranks
- padded: padded on the right
- uneven: lengths that no number of ranks divides, different in every step
- one_target: one target in the whole sequence
- border: labels of -100 around every border
"""


@dataclass(frozen=True)
class Case:
    """A configuration with context parallelism.

    Attributes:
        settings: Further settings of `parallel`.
        eager: Whether attention is Transformers' eager implementation.
        adapted: Whether the model is frozen, with LoRA adapters of PEFT that train.
    """

    kind: str
    data: Data = "causal"
    family: str = "llama"
    window: bool = False
    tied: bool = False
    stage: int = 0
    degrees: tuple[tuple[str, Any], ...] = (("cp", 2),)
    settings: tuple[tuple[str, Any], ...] = ()
    eager: bool = False
    adapted: bool = False

    @property
    def parallel(self):
        """Section `parallel` of the configuration."""
        return {"context": self.kind, **dict(self.degrees), **dict(self.settings)}

    @property
    def dp(self):
        """Number of data-parallel ranks."""
        return self._product("dp_shard", "dp_replicate")

    @property
    def world(self):
        """Number of processes."""
        return self._product("dp_shard", "dp_replicate", "cp", "tp", "pp")

    def _product(self, *axes):
        degrees = dict(self.degrees)
        return math.prod(degrees.get(axis, 1) for axis in axes)

    @property
    def layers(self):
        """Number of layers: two, or four where a rank has two stages."""
        schedule = dict(self.settings).get("pipeline", {}).get("schedule", "")
        return 4 if schedule in ("zbv", "interleaved-zero-bubble") else 2

    @property
    def name(self):
        """Name for a test's id."""
        terms = [self.kind, self.data, self.family]
        terms += [f"{axis}{size}" for axis, size in self.degrees]
        if self.stage:
            terms.append(f"zero{self.stage}")
        terms += [word for word in ("window", "tied", "eager", "adapted") if getattr(self, word)]
        terms += [key for key, _ in self.settings]
        return "-".join(terms)


def configured(case):
    """Return a configuration file as a user would write it."""
    return training_config(case.parallel, stage=case.stage)


def build(case, *, layers=None):
    """Build the model on `meta`, or with weights if it has adapters."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = cases.transformers_config(case.family, tied=case.tied, layers=layers or case.layers)
    # With a cache Transformers does not separate the documents of a packed row.
    config.use_cache = False
    if case.window:
        config.sliding_window = WINDOW
    if case.adapted:
        return adapted.on(AutoModelForCausalLM.from_config(config).to(torch.float64))

    attention = "eager" if case.eager else None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        return model.to(torch.float64)


@cache
def steps(data, micro_batches):
    """Return steps of micro-batches with different numbers of targets."""
    generator = torch.Generator().manual_seed(11)
    return [
        [_batch(data, step, index, generator) for index in range(micro_batches)]
        for step in range(STEPS)
    ]


def _batch(data, step, index, generator):
    length = 16 if data != "uneven" else 13 + 4 * step + index % 2
    ids = torch.randint(0, cases.VOCABULARY, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, : index + step] = -100
    batch = {"input_ids": ids, "labels": labels}

    if data == "packed":
        # The document at 3 spans the border of two ranks (8), and that at 6 those of four (8, 12).
        positions = torch.arange(length).repeat(2, 1)
        for row, starts in enumerate([(0, 3, 9, 10), (0, 1, 6, 14)]):
            for start in starts:
                positions[row, start:] -= positions[row, start].clone()
                labels[row, start] = -100
        batch["position_ids"] = positions
    if data == "padded":
        lengths = torch.tensor([[length - 5 - index], [length]])
        batch["attention_mask"] = (torch.arange(length) < lengths).long()
        labels[batch["attention_mask"] == 0] = -100
    if data == "one_target":
        labels[:] = -100
        labels[1, 3 + 5 * step + index] = ids[1, 3]
    if data == "border":
        labels[:, 4 * (1 + index) - 1 : 4 * (1 + index) + 1] = -100
        labels[1, 8] = -100
    return batch


def train(rank, world, case):
    """Return the trace of a run. Runs on every rank."""
    model = build(case)
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        return engine_trace(engine, steps(case.data, 2 * engine.dp_size))


def reference(case):
    """Return the trace of one plain process on the full batch."""
    alone = replace(case, kind="ring", stage=0, degrees=(), settings=())
    return _reference(alone, case.layers, 2 * case.dp)


@cache
def _reference(case, layers, micro_batches):
    model = build(case, layers=layers)
    if not case.adapted:
        materialise_model(model)

    def adamw(parameters):
        return cases.adamw([p for p in parameters if p.requires_grad])

    return plain_trace(model, steps(case.data, micro_batches), optimizer=adamw)


def assert_equal(case, traces):
    """Compare losses, gradients, norms and weights to 1e-10."""
    for trace in traces:
        if trace is not None:
            assert_same(reference(case), trace, where=case.name)
