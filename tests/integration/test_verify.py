"""`plait verify`: correct layouts are equal, planted defects are named, wrong input is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import plait
import plait.engine.build
import plait.engine.engine
import plait.parallel.techniques.pipeline_parallel
from plait._torch.tensors import local_window
from plait.comm.collectives import AsyncAllReduce, enter
from plait.config.resolving.resolve import load
from plait.errors import ParityError
from plait.parallel import materialise
from plait.parallel.data.reducer import Reducer
from plait.parallel.pipeline.runtime import Runtime
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.pipeline_parallel import PipelineRank
from plait.parallel.tensor import styles
from plait.sharded.step import Stepper
from plait.verify.plan import prepare
from plait.verify.report import failure, raise_unless_equal
from plait.verify.run import compare, run_layout
from tests.covers import proof_after
from tests.integration.commands import run_plait
from tests.parity.cases import PlainModel
from tests.table import check_each

ROOT = Path(__file__).parents[2]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 5001,
}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "model": {"config": LLAMA},
    "run": {"seed": 5},
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True}
PHI3 = {**LLAMA, "model_type": "phi3", "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
TP2 = {"parallel": {"tp": 2}}
STAGE_3 = {"zero_optimization": {"stage": 3}}
TIED = {"model": {"config": {**LLAMA, "tie_word_embeddings": True}}}


# The functions of models that the command builds by their name.


def plain():
    """Return a language model that is not in Transformers."""
    return PlainModel(tied=False)


class BareLogits(nn.Module):
    """Takes `tokens`, returns a tensor of logits, and has dropout in attention."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, dropout=0.3) for _ in range(4)
        )

    def forward(self, tokens):
        hidden = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return hidden @ self.embed.weight.T


def bare_logits():
    """Return a language model in plain torch."""
    return BareLogits()


SQUARES = plait.per_sample(lambda output, batch: F.mse_loss(output, batch[1], reduction="sum"))


def pairs_of(width):
    """Return a function that makes micro-batches of inputs and targets."""

    def micro_batch(samples, generator):
        return tuple(
            torch.randn(samples, size, generator=generator).double() for size in (6, width)
        )

    return micro_batch


def regression():
    """Return a model that is not a language model, its loss and its data."""
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)), SQUARES, pairs_of(2)


def chain():
    """Return equal blocks, and micro-batches that all have the same shape."""
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), SQUARES, pairs_of(6)


class Noisy(PlainModel):
    def forward(self, input_ids, side=False):
        output = super().forward(input_ids, side)
        output.logits = output.logits + torch.randn_like(output.logits)
        return output


def random_model():
    """Return a model with noise that no dropout rate turns off."""
    return Noisy(tied=True)


class Counted(PlainModel):
    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for index in range(3):
            hidden = self.blocks[index](hidden, side)
        return self.head(hidden)


def counted():
    """Return a model that fails without one of its three blocks."""
    return Counted(tied=False)


def text():
    """Return no model."""
    return "model"


class CompletedWork:
    def wait(self):
        pass


def no_reduction(self, bucket):
    self._next_bucket += 1
    bucket.work = CompletedWork()


def broken():
    """Return a model, and break the engine of the process if it is one of two ranks."""
    if "plait.verify.run" in sys.modules and os.environ.get("WORLD_SIZE") == "2":
        Reducer._launch = no_reduction
    return plain()


class Stuck(PlainModel):
    def forward(self, input_ids, side=False):
        if os.environ.get("RANK") == "1":
            time.sleep(3600)
        return super().forward(input_ids, side)


def stuck():
    """Return a model that hangs on one rank, as if the rank had left out a collective."""
    return Stuck(tied=False)


# Planted defects. Each replaces a function of the program.

ATTACH_HOOKS = DataParallel.attach
ATTACH = Reducer.attach
INITIALISE = materialise.initialise
STEP = Stepper.__call__
STAGE_MODEL = plait.parallel.techniques.pipeline_parallel.stage_model
TRAIN = Runtime.train


def reduce_in_float32(self):
    self.reduce_dtype = torch.float32
    ATTACH(self)


def average(self, parts, mesh):
    with patch(f"{DataParallel.__module__}.reduce_by_sum", lambda model: None):
        hooks = ATTACH_HOOKS(self, parts, mesh)
    for hook in hooks:
        if isinstance(hook, Reducer):
            hook.mean = True
    return hooks


def keep_scalars_local(value, group):
    """Leave out the sum of the number of targets, the only scalar that the engine reduces."""
    return AsyncAllReduce(value, group if value.ndim else None)


def initialise_by_rank(model, template, blocks, *, seed, **arguments):
    INITIALISE(model, template, blocks, seed=seed + torch.distributed.get_rank(), **arguments)


def step_on_rank_0(self, **arguments):
    if torch.distributed.get_rank():
        with patch.object(self.optimizer, "step"):
            return STEP(self, **arguments)
    return STEP(self, **arguments)


def cut_one_block_later(model, cut, indices, **arguments):
    if torch.distributed.get_rank():
        cut = replace(cut, bounds=(cut.bounds[0], cut.bounds[1] + 1, *cut.bounds[2:]))
    return STAGE_MODEL(model, cut, indices, **arguments)


def reverse_on_rank_1(self, micro_batches, **arguments):
    if torch.distributed.get_rank():
        micro_batches = micro_batches[::-1]
    TRAIN(self, micro_batches, **arguments)


def sum_twice(module, region):
    original = module.forward

    def forward(*args, **kwargs):
        doubled = {}
        for name, parameter in module.named_parameters(recurse=False):
            doubled[name] = enter(enter(parameter, region.group), region.group)
        with styles.replace_values(module, doubled):
            return original(*args, **kwargs)

    return forward


def untie(model, *args, **options):
    INITIALISE(model, *args, **options)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def other_half(parameter):
    """Return the window of the other rank for fused weights that are split in halves."""
    window = local_window(parameter)
    rows = window[0]
    size = rows.stop - rows.start
    if size * 2 != parameter.shape[0] or parameter.shape[0] <= parameter.shape[1]:
        return window
    start = parameter.shape[0] - rows.stop
    return slice(start, start + size), *window[1:]


DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "missing all-reduce": (Reducer, "_launch", no_reduction),
    "mean instead of sum": (DataParallel, "attach", average),
    "wrong weight": (plait.engine.engine, "AsyncAllReduce", keep_scalars_local),
    "unsynchronised weights": (materialise, "broadcast", lambda *_, **__: None),
    "initialised by rank": (materialise, "initialise", initialise_by_rank),
    "reduced in float32": (Reducer, "attach", reduce_in_float32),
    "not clipped": (Stepper, "_unscale_and_clip", lambda self, grads, norm, unscale: None),
    "updated on rank 0 only": (Stepper, "__call__", step_on_rank_0),
    "wrong stage cut": (
        plait.parallel.techniques.pipeline_parallel,
        "stage_model",
        cut_one_block_later,
    ),
    "lost tied gradient": (PipelineRank, "finish_reduction", lambda _: None),
    "micro-batches swapped": (Runtime, "train", reverse_on_rank_1),
    "missing all-reduce over tp": (styles, "leave", lambda x, group: x),
    "missing all-reduce of gradients over tp": (styles, "enter", lambda x, group: x),
    "replicated gradient counted double": (styles, "summed_gradient", sum_twice),
    "untied embedding": (materialise, "initialise", untie),
    "wrong shard": (materialise, "local_window", other_half),
}


def planned(*, function=None, processes=2, passes=("float64",), **changes):
    """Return the plan of the command for a changed configuration.

    Args:
        function: Function of this module that returns the model, in place of a configuration.
        processes: Number of processes, or None.
        passes: Precisions that are compared.
        changes: Sections of the configuration.
    """
    return prepare(
        load({**CONFIG, **changes}),
        model=f"{__name__}:{function.__name__}" if function is not None else None,
        processes=processes,
        most_processes=8,
        steps=2,
        passes=passes,
    )


def notes_of(plan):
    """Return what the plan says about settings that it changes."""
    return "\n".join(line for _, line in plan.lines)


def run_with_defect(rank, world, plan, defect):
    """Runs on every rank."""
    if defect is None:
        return run_layout(plan)
    owner, name, replacement = DEFECTS[defect]
    with patch.object(owner, name, replacement):
        return run_layout(plan)


def compared(pool, plan, defect=None):
    """Return the report of a plan whose layout runs in the pool."""
    return compare(plan, pool.run(plan.world_size, run_with_defect, plan, defect)[0])


TP2_QWEN3 = {**TP2, "model": {"config": QWEN3}}
PLANTED: list[tuple[str, Any, dict[str, Any]]] = [
    ("missing all-reduce", plain, {}),
    ("updated on rank 0 only", None, {}),
    ("wrong stage cut", None, {"parallel": {"pp": 2}}),
    ("wrong shard", None, {**TP2, "model": {"config": PHI3}}),
    ("mean instead of sum", plain, {}),
    ("mean instead of sum", None, {"zero_optimization": {"stage": 2}}),
    ("wrong weight", None, {"zero_optimization": {"stage": 1}}),
    ("unsynchronised weights", plain, STAGE_3),
    ("initialised by rank", None, STAGE_3),
    ("reduced in float32", None, {}),
    ("not clipped", None, STAGE_3),
    ("lost tied gradient", None, {"parallel": {"pp": 2}, **TIED}),
    ("micro-batches swapped", chain, {"parallel": {"pp": 2, "pipeline": {"schedule": "gpipe"}}}),
    ("missing all-reduce over tp", None, TP2_QWEN3),
    ("missing all-reduce of gradients over tp", None, TP2_QWEN3),
    ("replicated gradient counted double", None, TP2_QWEN3),
    ("untied embedding", None, TP2_QWEN3),
]


@pytest.mark.parametrize(
    ("defect", "function", "changes"),
    proof_after(4, PLANTED, name=lambda defect, function, _: f"{defect}-{function is not None}"),
)
def test_planted_defects_are_named(pool, defect, function, changes):
    """The error is that of the command, which ends with exit code 3."""
    plan = planned(function=function, **changes)
    report = compared(pool, plan, defect)
    assert not report.equal
    name = report.as_dict()["first_different"]
    assert name in dict(plan.build(torch.float64).model.named_parameters(remove_duplicate=False))
    with pytest.raises(ParityError, match=re.escape(name)) as caught:
        raise_unless_equal(report)
    assert caught.value.exit_code == 3


def test_different_initial_weights_are_named_as_such(pool):
    """The message does not blame the gradients, which differ too."""
    report = compared(pool, planned(function=plain), "unsynchronised weights")
    message = "first: initial weight of embed.weight: ranks hold different copies"
    assert message in failure(report)


MUON = {"type": "Muon", "params": {"lr": 1e-2}}
ZBV = {"pp": 2, "pipeline": {"schedule": "zbv"}}
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
EQUAL: dict[str, dict[str, Any]] = {
    "bf16": {**STAGE_3, "bf16": {"enabled": True}},
    "experts": {
        "model": {"config": {"model_type": "mixtral", "num_hidden_layers": 4}},
        "zero_optimization": {"stage": 2},
    },
    "qwen3": TP2_QWEN3,
    "fp16": {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
    "uneven": {"processes": 3, "zero_optimization": {"stage": 2}},
    "tied-bf16-parameters": {"model": {**TIED["model"], "dtype": "bfloat16"}},
    "islands": {"model": {"config": {"model_type": "gemma3_text", "vocab_size": 5001}}},
    "pipeline": {"parallel": ZBV, "bf16": {"enabled": True}},
    "muon": {"optimizer": MUON, "zero_optimization": {"stage": 2}},
    "qwen3-sp-zero3": {
        "processes": 4,
        "parallel": SEQUENCE_PARALLEL,
        "model": {"config": QWEN3},
        **STAGE_3,
    },
    "phi3": {**TP2, "model": {"config": PHI3}},
}


@pytest.mark.parametrize("name", proof_after(3, EQUAL))
def test_equal(pool, name):
    """Models may also round by themselves, as Gemma does in islands of float32."""
    plan = planned(passes=("float64", "configured"), **EQUAL[name])
    report = compared(pool, plan)
    assert report.equal, failure(report)
    assert [section.name for section in report.sections] == ["float64", "independent", "configured"]
    unchecked = "not compared: everything after it, because this reference only has AdamW"
    assert (unchecked in "\n".join(report.sections[1].notes)) == (name == "muon")
    assert "within 1e-10" in report.sections[0].title


PLAIN_MODULES = [
    (3, plain),
    (0, regression),
    (0, plain),
    (0, bare_logits),
    (3, bare_logits),
    (3, regression),
]


@pytest.mark.parametrize(
    ("stage", "function"),
    proof_after(2, PLAIN_MODULES, name=lambda stage, function: f"{stage}-{function.__name__}"),
)
def test_equal_for_plain_modules(pool, function, stage):
    """Every rank draws other initial weights, and the engine broadcasts those of rank 0."""
    report = compared(pool, planned(function=function, zero_optimization={"stage": stage}))
    assert report.equal, failure(report)
    assert ("has its own loss" in "\n".join(report.sections[1].notes)) == (function is regression)
    assert bool(report.sections[1].rows) == (function is not regression)


def test_model_that_counts_its_blocks_is_not_shrunk():
    plan = planned(function=counted)
    assert len(plan.build(torch.float64).model.blocks) == 3
    assert "as it is: with 2 of its 3 blocks it does not run" in notes_of(plan)


def run_command(folder, *arguments, config=CONFIG):
    """Run `plait verify` in processes, two of them if the configuration does not say."""
    (folder / "run.json").write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", "plait", "verify", "run.json", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_command_with_an_equal_layout(tmp_path):
    config = {**CONFIG, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    done = run_command(tmp_path, "--steps", "2", "--json", config=config)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # standard output has nothing else
    assert report["equal"] is True and report["first_different"] is None
    assert report["processes"] == 2 and report["zero_stage"] == 2
    assert report["layout"]["dp_shard"] == 2
    names = [section["name"] for section in report["passes"]]
    assert names == ["float64", "independent", "configured"]
    kinds = {row["kind"] for row in report["passes"][0]["rows"]}
    assert kinds == {"initial weight", "loss", "gradient norm", "gradient", "parameter"}
    assert "hidden_size 512 -> " in "\n".join(report["notes"])


@pytest.mark.proof
def test_command_with_a_different_layout(tmp_path):
    model = ("--model", f"{__name__}:broken")
    done = run_command(tmp_path, *model, "--steps", "1", "--dtype", "float64", "--all")
    assert done.returncode == 3, done.stderr
    assert "DIFFERENT" in done.stdout and "gradient blocks.0.up.weight" in done.stdout
    assert "plait:   first: gradient of embed.weight in step 0: error " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.proof
def test_timeout_prints_the_stacks(tmp_path):
    model = ("--model", f"{__name__}:stuck")
    done = run_command(tmp_path, *model, "--timeout", "10", "--dtype", "float64", "--json")
    assert done.returncode not in (0, 2, 3)
    assert not done.stdout
    assert "Timeout (0:00:10)!" in done.stderr and " in train_batch" in done.stderr


BERT = {"model": {"config": {"model_type": "bert"}}, "parallel": {"tp": 16}}
MISSPELT = {"model": {"config": {**LLAMA, "hiden_size": 4}}}
WRONG_INPUT = [
    # arguments, changes of the configuration, message
    ("", {"model": None}, "the file names no model; add"),
    ("--model tests.no_such:thing", {}, "there is no module 'tests.no_such'"),
    (f"--model {__name__}:no_such", {}, "has no function 'no_such'"),
    (f"--model {__name__}:text", {}, "the function returned a str; it must return a module"),
    (f"--model {__name__}:random_model", {}, "The model is random even without dropout"),
    ("--model ./nowhere", {}, "--model = './nowhere': there is no such file or folder"),
    ("", {"model": {"config": {"model_type": "lama"}}}, "no such architecture; use 'llama'"),
    ("", BERT, "dp_replicate 2 = 32 processes, but at most 8 are started by default"),
    ("--nproc-per-node 3", TP2, "start 2 or 4 processes"),
    ("", MISSPELT, "model.config.hiden_size = 4: a 'llama' configuration has no such field; use"),
    ("--steps 0", {}, "--steps 0: at least one step"),
    ("--tolerance 0", {}, "--tolerance 0.0: not a positive number"),
    ("--device cuda --nproc-per-node 64", {}, "64 processes need a GPU each"),
    ("--set zero_optimization.stage=7", {}, "zero_optimization.stage"),
]


def test_wrong_input_is_refused(tmp_path, monkeypatch, capsys):
    def check(arguments, changes, message):
        config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not None}
        (tmp_path / "run.json").write_text(json.dumps(config))
        run_plait(f"verify {tmp_path}/run.json {arguments}", code=2)
        assert message in capsys.readouterr().err

    def launch(*_, **__):
        raise AssertionError("processes were started")

    monkeypatch.setattr("plait.cli.launch.run", launch)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the current folder
    check_each(WRONG_INPUT, check)


@pytest.mark.parametrize(
    ("parallel", "stage", "degrees"),
    [
        ({}, 0, (1, 2, 1, 1, 1)),
        ({}, 2, (1, 1, 2, 1, 1)),
        ({"tp": 2}, 0, (1, 2, 1, 1, 2)),
        ({"tp": 2, "dp_shard": 64}, 3, (1, 1, 2, 1, 2)),
        ({"dp_replicate": 2}, 3, (1, 2, 2, 1, 1)),
        ({"dp_shard": 3}, 3, (1, 1, 3, 1, 1)),
    ],
)
def test_layout(parallel, stage, degrees):
    """tp stays, open data-parallel degrees are 2, and others shrink to the number of processes."""
    changes = {"parallel": parallel, "zero_optimization": {"stage": stage}}
    plan = planned(processes=None, **changes)
    assert tuple(plan.resolved.layout.degrees.values()) == degrees
    assert ("dp_shard 64 -> 2" in notes_of(plan)) == (parallel.get("dp_shard") == 64)


def test_shrunk_settings():
    """The float64 pass keeps every mechanism of mixed precision."""
    plan = planned(
        fp16={"enabled": True},
        gradient_accumulation_steps=16,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
    )
    assert (plan.resolved.batch.micro_batch_size, plan.resolved.batch.accumulation) == (2, 3)
    assert plan.resolved.scheduler is None
    notes = notes_of(plan)
    assert "gradient_accumulation_steps 16 -> 3" in notes
    assert "WarmupLR is left out" in notes
    assert "initial_scale_power 16 -> 12" in notes

    resolved, dtype = plan.settings("float64")
    assert dtype == torch.float64
    precision = resolved.precision
    assert (precision.compute, precision.reduction) == ("float64", "float64")
    assert precision.loss_scale == plan.resolved.precision.loss_scale
    assert plan.settings("configured") == (plan.resolved, torch.float32)


def test_schedule_that_needs_many_micro_batches():
    plan = planned(
        parallel={"pp": 2, "pipeline": {"schedule": "dualpipev"}},
        gradient_accumulation_steps=16,
        zero_optimization={"stage": 1},
    )
    assert plan.resolved.batch.accumulation == 4


def test_buckets_shrink_with_the_model():
    """A small model in one bucket of 25 MiB would not show a wrong order of buckets."""
    plan = planned()
    model = plan.build(torch.float64).model
    total_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan.resolved.data_parallel.bucket_bytes < total_bytes / 3


def test_data_is_uneven():
    """Lengths, padding and numbers of targets differ, and one micro-batch has no target."""
    plan = planned()
    data = plan.data(plan.build(torch.float64))
    assert [len(step) for step in data] == [4, 4]
    micro_batches = [*data[0], *data[1]]
    assert len({micro_batch["input_ids"].shape for micro_batch in micro_batches}) > 2
    weights = [int(plait.causal_lm_loss.weight(micro_batch)) for micro_batch in micro_batches]
    assert weights[1] == 0 and len(set(weights)) > 3
    masks = [mask for micro_batch in micro_batches for mask in micro_batch["attention_mask"]]
    assert len({int(mask.sum()) for mask in masks}) > 3
    assert any(not mask[0] for mask in masks), "padded on the left"
    assert any(not mask[-1] for mask in masks), "padded on the right"

    again = plan.data(plan.build(torch.float64))
    for first, second in zip(data[1], again[1], strict=True):
        assert torch.equal(first["input_ids"], second["input_ids"])
