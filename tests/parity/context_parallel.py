"""Training with context parallelism, and the same in one process, for the tests that compare the two. Imported by workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

import plait
from plait.model.blocks import find_blocks
from plait.parallel import materialise
from plait.verify.keep_float64 import keeping_float64
from plait.verify.parity import engine_trace
from tests.parity import adapted, cases
from tests.parity.data_parallel import assert_same, plain_trace

CLIPPING, SEED, STEPS = 0.5, 3, 2
Data = Literal["causal", "packed", "padded", "uneven", "one_target", "border"]
"""What the rows of a batch are: full; several documents, one of them over a border between parts; padded on the right; of a length that no
number of parts divides, and another one in every step; with one target in all of the sequence; with labels of -100 around every border."""
WINDOW = 5


@dataclass(frozen=True)
class Case:
    """A configuration with context parallelism."""

    kind: str
    data: Data = "causal"
    family: str = "llama"
    window: bool = False
    tied: bool = False
    stage: int = 0
    degrees: tuple[tuple[str, Any], ...] = (("cp", 2),)
    more: tuple[tuple[str, Any], ...] = ()
    eager: bool = False
    adapted: bool = False
    """Whether the model is frozen, with adapters of PEFT's LoRA that train."""

    @property
    def parallel(self):
        """The section of the file."""
        return {"context": self.kind, **dict(self.degrees), **dict(self.more)}

    @property
    def dp(self):
        """Data-parallel ranks."""
        return int(dict(self.degrees).get("dp_shard", 1)) * int(
            dict(self.degrees).get("dp_replicate", 1)
        )

    @property
    def world(self):
        """Processes."""
        product = self.dp
        for axis in ("cp", "tp", "pp"):
            product *= int(dict(self.degrees).get(axis, 1))
        return product

    @property
    def layers(self):
        """Of the model: two, and twice as many where a rank has two stages."""
        schedule = dict(self.more).get("pipeline", {}).get("schedule", "")
        return 4 if schedule in ("zbv", "interleaved-zero-bubble") else 2

    @property
    def name(self):
        """For a test's id."""
        parts = [
            self.kind,
            self.data,
            self.family,
            *(f"{axis}{size}" for axis, size in self.degrees),
        ]
        parts += [f"zero{self.stage}"] if self.stage else []
        parts += [
            word
            for word, on in (
                ("window", self.window),
                ("tied", self.tied),
                ("eager", self.eager),
                ("adapted", self.adapted),
            )
            if on
        ]
        return "-".join([*parts, *(f"{key}" for key, _ in self.more)])


def configured(case):
    """A configuration file as a user would write it."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": CLIPPING,
        "zero_optimization": {"stage": case.stage},
        "optimizer": cases.OPTIMIZER,
        "parallel": case.parallel,
        "run": {"seed": SEED},
    }


def build(case, *, layers=None):
    """The model on meta."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    config = cases.transformers_config(case.family, tied=case.tied, layers=layers or case.layers)
    config.use_cache = False  # with a cache Transformers does not look for documents
    if case.window:
        config.sliding_window = WINDOW
    if case.adapted:
        return adapted.on(AutoModelForCausalLM.from_config(config).to(torch.float64))
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager" if case.eager else None
        )
        return made.to(torch.float64)


@cache
def steps(data, micro_batches):
    """Micro-batches of every step, with other numbers of targets in each."""
    generator, found = torch.Generator().manual_seed(11), []
    for step in range(STEPS):
        found.append([])
        for index in range(micro_batches):
            length = 16 if data != "uneven" else 13 + 4 * step + index % 2
            ids = torch.randint(0, cases.VOCABULARY, (2, length), generator=generator)
            labels = ids.clone()
            labels[0, : index + step] = -100
            piece = {"input_ids": ids, "labels": labels}
            if data == "packed":
                ends = [
                    (0, 3, 9, 10),
                    (0, 1, 6, 14),
                ]  # 9 lies over a border of halves, and 6 over one of quarters
                positions = torch.arange(length).repeat(2, 1)
                for row, starts in enumerate(ends):
                    for start in starts:
                        positions[row, start:] -= positions[row, start].clone()
                        labels[row, start] = -100
                piece["position_ids"] = positions
            if data == "padded":
                piece["attention_mask"] = (
                    torch.arange(length) < torch.tensor([[length - 5 - index], [length]])
                ).long()
                labels[piece["attention_mask"] == 0] = -100
            if data == "one_target":
                labels[:] = -100
                labels[1, 3 + 5 * step + index] = ids[1, 3]
            if data == "border":
                labels[:, 4 * (1 + index) - 1 : 4 * (1 + index) + 1] = -100
                labels[1, 8] = -100
            found[-1].append(piece)
    return found


def train(rank, world, case):
    """Runs in a worker."""
    model = build(case)
    with keeping_float64(model):
        engine = plait.initialize(model, configured(case), loss_fn=plait.causal_lm_loss)
        return engine_trace(engine, steps(case.data, 2 * engine.dp_size))


def reference(case):
    """One plain process on the full batch."""
    return _reference(
        replace(case, kind="ring", stage=0, degrees=(), more=()), case.layers, 2 * case.dp
    )


@cache
def _reference(case, layers, micro_batches):
    """Of a case without what one process does not have."""
    model = build(case, layers=layers)
    if not case.adapted:
        template = materialise.template_of(model)
        materialise.allocate(model, torch.device("cpu"))
        materialise.initialise(model, template, find_blocks(model), seed=SEED)
    return plain_trace(
        model,
        steps(case.data, micro_batches),
        optimizer=lambda parameters: cases.adamw([p for p in parameters if p.requires_grad]),
    )


def assert_equal(case, traces):
    """Losses, gradients, norms and weights to 1e-10."""
    for trace in traces:
        if trace is not None:
            assert_same(reference(case), trace, where=case.name)
