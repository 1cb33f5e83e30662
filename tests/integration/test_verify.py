"""`plait verify`, tensor parallelism included: equal layouts are found equal, planted defects are found and named, wrong input is refused before any process."""

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
from plait.cli.main import main
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
from tests.parity.cases import PlainModel

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

FILE: dict[str, Any] = {
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


def plain():
    """A language model with weights of its own."""
    return PlainModel(tied=False)


class BareLogits(nn.Module):
    """Takes `tokens` and returns the logits themselves; its attention drops."""

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
    """A language model in plain torch."""
    return BareLogits()


SQUARES = plait.per_sample(lambda output, batch: F.mse_loss(output, batch[1], reduction="sum"))


def pairs_of(width):
    """Micro-batches of inputs and targets."""

    def micro_batch(samples, generator):
        return tuple(
            torch.randn(samples, size, generator=generator).double() for size in (6, width)
        )

    return micro_batch


def regression():
    """No language model: it brings its loss and its data."""

    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)), SQUARES, pairs_of(2)


def chain():
    """Equal blocks, and micro-batches that are all of one shape."""

    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), SQUARES, pairs_of(6)


def random_model():
    """Noise that no dropout rate turns off."""

    class Noisy(PlainModel):
        def forward(self, input_ids, side=False):
            output = super().forward(input_ids, side)
            output.logits = output.logits + torch.randn_like(output.logits)
            return output

    return Noisy(tied=True)


class _Done:
    def wait(self):
        pass


def _launch_nothing(self, bucket):
    self._next_bucket += 1
    bucket.work = _Done()


def _attach_in_float32(self):
    self.reduce_dtype = torch.float32
    _attach(self)


def _average(self, parts, mesh):
    with patch(f"{DataParallel.__module__}.reduce_by_sum", lambda model: None):
        hooks = _attach_hooks(self, parts, mesh)
    for hook in hooks:
        if isinstance(hook, Reducer):
            hook.mean = True
    return hooks


def _scalars_stay_local(value, group):
    """The count of a step's targets is the engine's only pending scalar."""
    return AsyncAllReduce(value, group if value.ndim else None)


def _unclipped(self, grads, norm, unscale):
    pass


def _initialise_by_rank(model, template, blocks, *, seed, **arguments):
    _initialise(model, template, blocks, seed=seed + torch.distributed.get_rank(), **arguments)


def _step_on_rank_0(self, **arguments):
    if torch.distributed.get_rank():
        with patch.object(self.optimizer, "step"):
            return _step(self, **arguments)
    return _step(self, **arguments)


def _next_block(model, cut, indices, **arguments):
    if torch.distributed.get_rank():
        cut = replace(cut, bounds=(cut.bounds[0], cut.bounds[1] + 1, *cut.bounds[2:]))
    return _stage_model(model, cut, indices, **arguments)


def _reversed_on_rank_1(self, pieces, **arguments):
    _train(self, pieces[::-1] if torch.distributed.get_rank() else pieces, **arguments)


def _summed_twice(module, region):
    original = module.forward

    def forward(*args, **kwargs):
        doubled = {
            name: enter(enter(p, region.group), region.group)
            for name, p in module.named_parameters(recurse=False)
        }
        with styles.replace_values(module, doubled):
            return original(*args, **kwargs)

    return forward


def _untied(model, *args, **options):
    _initialise(model, *args, **options)
    head = model.get_output_embeddings()  # type: ignore[operator]
    head.weight = torch.nn.Parameter(head.weight.detach().clone())


def _next_ranks(parameter):
    """The neighbour's slice of a fused weight."""
    window = _window(parameter)
    rows = window[0]
    size = rows.stop - rows.start
    if size * 2 != parameter.shape[0] or parameter.shape[0] <= parameter.shape[1]:
        return window
    start = parameter.shape[0] - rows.stop
    return slice(start, start + size), *window[1:]


_stage_model, _train = plait.parallel.techniques.pipeline_parallel.stage_model, Runtime.train
_attach_hooks = DataParallel.attach
_attach, _initialise, _step = Reducer.attach, materialise.initialise, Stepper.__call__
_window = local_window
DEFECTS: dict[str, tuple[Any, str, Any]] = {
    "missing all-reduce": (Reducer, "_launch", _launch_nothing),
    "mean instead of sum": (DataParallel, "attach", _average),
    "wrong weight": (plait.engine.engine, "AsyncAllReduce", _scalars_stay_local),
    "unsynchronised weights": (materialise, "broadcast", lambda *_, **__: None),
    "initialised by rank": (materialise, "initialise", _initialise_by_rank),
    "reduced in float32": (Reducer, "attach", _attach_in_float32),
    "not clipped": (Stepper, "_unscale_and_clip", _unclipped),
    "updated on rank 0 only": (Stepper, "__call__", _step_on_rank_0),
    "wrong stage cut": (plait.parallel.techniques.pipeline_parallel, "stage_model", _next_block),
    "lost tied gradient": (PipelineRank, "finish_reduction", lambda _: None),
    "micro-batches swapped": (Runtime, "train", _reversed_on_rank_1),
    "missing all-reduce over tp": (styles, "leave", lambda x, group: x),
    "missing all-reduce of gradients over tp": (styles, "enter", lambda x, group: x),
    "replicated gradient counted double": (styles, "summed_gradient", _summed_twice),
    "untied embedding": (materialise, "initialise", _untied),
    "wrong shard": (materialise, "local_window", _next_ranks),
}


def planned(*, given=None, processes=2, passes=("float64",), **changes):
    """Of FILE with changes, as the command makes it."""
    model = f"{__name__}:{given.__name__}" if given is not None else None
    return prepare(
        load({**FILE, **changes}),
        model=model,
        processes=processes,
        most_processes=8,
        steps=2,
        passes=passes,
    )


def work(rank, world, plan, defect):
    """Runs in a worker."""
    if defect is None:
        return run_layout(plan)
    owner, name, replacement = DEFECTS[defect]
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        return run_layout(plan)
    finally:
        setattr(owner, name, original)


def compared(pool, plan, defect=None):
    """Of a plan whose layout runs in the pool."""
    return compare(plan, pool.run(plan.world_size, work, plan, defect)[0])


STAGE_3 = {"zero_optimization": {"stage": 3}}
TIED = {"model": {"config": {**LLAMA, "tie_word_embeddings": True}}}
FOUND: list[tuple[str, Any, dict[str, Any]]] = [
    ("missing all-reduce", plain, {}),
    ("updated on rank 0 only", None, {}),
    ("wrong stage cut", None, {"parallel": {"pp": 2}}),
    ("wrong shard", None, {**TP2, "model": {"config": PHI3}}),
    ("mean instead of sum", plain, {}),
    ("mean instead of sum", None, {"zero_optimization": {"stage": 2}}),
    ("wrong weight", None, {"zero_optimization": {"stage": 1}}),
    ("unsynchronised weights", plain, {}),
    ("unsynchronised weights", plain, STAGE_3),
    ("initialised by rank", None, STAGE_3),
    ("reduced in float32", None, {}),
    ("not clipped", None, STAGE_3),
    ("lost tied gradient", None, {"parallel": {"pp": 2}, **TIED}),
    ("micro-batches swapped", chain, {"parallel": {"pp": 2, "pipeline": {"schedule": "gpipe"}}}),
    *(
        (defect, None, {**TP2, "model": {"config": QWEN3}})
        for defect in (
            "missing all-reduce over tp",
            "missing all-reduce of gradients over tp",
            "replicated gradient counted double",
            "untied embedding",
        )
    ),
]


@pytest.mark.parametrize(
    ("defect", "function", "changes"),
    proof_after(4, FOUND, name=lambda defect, function, _: f"{defect}-{function is not None}"),
)
def test_defects_are_found_and_named(pool, defect, function, changes):
    """With the error that the command ends with (exit code 3)."""
    plan = planned(given=function, **changes)
    report = compared(pool, plan, defect)
    assert not report.equal
    named = report.as_dict()["first_different"]
    model = plan.build(torch.float64).model
    assert named in dict(model.named_parameters(remove_duplicate=False))
    with pytest.raises(ParityError, match=re.escape(named)) as caught:
        raise_unless_equal(report)
    assert caught.value.exit_code == 3


def test_what_is_found_first(pool):
    """Weights that differ before training are told as such, not as wrong gradients."""
    told = failure(compared(pool, planned(given=plain), "unsynchronised weights"))
    assert "first: initial weight of embed.weight: ranks hold different copies" in told


EQUAL: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (2, {**STAGE_3, "bf16": {"enabled": True}}),
    "experts": (
        2,
        {
            "model": {"config": {"model_type": "mixtral", "num_hidden_layers": 4}},
            "zero_optimization": {"stage": 2},
        },
    ),
    "qwen3": (2, {**TP2, "model": {"config": QWEN3}}),
    "fp16": (2, {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}),
    "uneven": (3, {"zero_optimization": {"stage": 2}}),
    "tied-bf16-parameters": (2, {"model": {**TIED["model"], "dtype": "bfloat16"}}),
    "islands": (2, {"model": {"config": {"model_type": "gemma3_text", "vocab_size": 5001}}}),
    "pipeline": (
        2,
        {"parallel": {"pp": 2, "pipeline": {"schedule": "zbv"}}, "bf16": {"enabled": True}},
    ),
    "muon": (
        2,
        {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 2}},
    ),
    "qwen3-sp-zero3": (
        4,
        {"parallel": {"tp": 2, "sequence_parallel": True}, "model": {"config": QWEN3}, **STAGE_3},
    ),
    "phi3": (2, {**TP2, "model": {"config": PHI3}}),
}


@pytest.mark.parametrize("name", proof_after(3, EQUAL))
def test_equal(pool, name):
    """Both comparisons, in whatever precision and with whatever a model rounds by itself."""
    processes, changes = EQUAL[name]
    plan = planned(processes=processes, passes=("float64", "configured"), **changes)
    report = compared(pool, plan)
    assert report.equal, failure(report)
    assert [section.name for section in report.sections] == ["float64", "independent", "configured"]
    unchecked = (
        "not compared: everything after it, because this reference only has AdamW" in note
        for note in report.sections[1].notes
    )
    assert any(unchecked) == ("optimizer" in changes)
    assert "within 1e-10" in report.sections[0].title


@pytest.mark.parametrize(
    ("stage", "function"),
    proof_after(
        2,
        [
            (3, plain),
            (0, regression),
            (0, plain),
            (0, bare_logits),
            (3, bare_logits),
            (3, regression),
        ],
        name=lambda stage, function: f"{stage}-{function.__name__}",
    ),
)
def test_equal_for_plain_modules(pool, function, stage):
    """Models that Transformers does not know, with weights of their own that differ on every rank until the engine makes them equal."""
    report = compared(pool, planned(given=function, zero_optimization={"stage": stage}))
    assert report.equal, failure(report)
    assert bool(report.sections[1].rows) == (function is not regression)
    assert any("has its own loss" in note for note in report.sections[1].notes) == (
        function is regression
    )


def test_a_model_that_counts_its_blocks_stays_whole():
    """What cannot be made smaller is compared as it is, and that is told."""
    plan = planned(given=counted)
    assert len(plan.build(torch.float64).model.blocks) == 3
    assert any("as it is: with 2 of its 3 blocks it does not run" in line for _, line in plan.lines)


def run(folder, *arguments, file=FILE):
    """`plait verify` as a user runs it, on two processes where the file leaves it open."""
    (folder / "run.json").write_text(json.dumps(file))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(ROOT)])
    command = [sys.executable, "-m", "plait", "verify", "run.json", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_command_equal(tmp_path):
    """Exit code 0, one object for machines on standard output and nothing else."""
    file = {**FILE, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    done = run(tmp_path, "--steps", "2", "--json", file=file)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["equal"] is True and found["first_different"] is None
    assert found["processes"] == 2 and found["layout"]["dp_shard"] == 2 and found["zero_stage"] == 2
    assert [part["name"] for part in found["passes"]] == ["float64", "independent", "configured"]
    assert {row["kind"] for row in found["passes"][0]["rows"]} == {
        "initial weight",
        "loss",
        "gradient norm",
        "gradient",
        "parameter",
    }
    assert any("hidden_size 512 -> " in note for note in found["notes"])


def broken():
    """A model that breaks the engine of the processes that build it."""
    if "plait.verify.run" in sys.modules and os.environ.get("WORLD_SIZE") == "2":
        Reducer._launch = _launch_nothing  # type: ignore[method-assign]
    return plain()


@pytest.mark.proof
def test_command_different(tmp_path):
    """Exit code 3; the table says which, the message names the first; no traceback."""
    done = run(
        tmp_path, "--model", f"{__name__}:broken", "--steps", "1", "--dtype", "float64", "--all"
    )
    assert done.returncode == 3, done.stderr
    assert "DIFFERENT" in done.stdout and "gradient blocks.0.up.weight" in done.stdout
    assert "plait:   first: gradient of embed.weight in step 0: error " in done.stderr
    assert "Traceback" not in done.stderr


def stuck():
    """A model that never returns on one rank, as a rank that left a collective out."""

    class Stuck(PlainModel):
        def forward(self, input_ids, side=False):
            if os.environ.get("RANK") == "1":
                time.sleep(3600)
            return super().forward(input_ids, side)

    return Stuck(tied=False)


@pytest.mark.proof
def test_command_ends_where_processes_wait_for_each_other(tmp_path):
    """With the stacks of all threads, which show where."""
    done = run(
        tmp_path, "--model", f"{__name__}:stuck", "--timeout", "10", "--dtype", "float64", "--json"
    )
    assert done.returncode not in (0, 2, 3)
    assert not done.stdout
    assert "Timeout (0:00:10)!" in done.stderr and " in train_batch" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "changes", "told"),
    [
        ((), {"model": None}, "the file names no model; add"),
        (("--model", "tests.no_such:thing"), {}, "there is no module 'tests.no_such'"),
        (("--model", f"{__name__}:no_such"), {}, "has no function 'no_such'"),
        (
            ("--model", f"{__name__}:work_nothing"),
            {},
            "the function returned a str; it must return a module",
        ),
        (("--model", f"{__name__}:random_model"), {}, "The model is random even without dropout"),
        (("--model", "./nowhere"), {}, "--model = './nowhere': there is no such file or folder"),
        (
            (),
            {"model": {"config": {"model_type": "lama"}}},
            "Transformers has no such architecture; use 'llama'",
        ),
        (
            (),
            {"model": {"config": {"model_type": "bert"}}, "parallel": {"tp": 16}},
            "dp_replicate 2 = 32 processes, but at most 8 are started by default",
        ),
        (("--nproc-per-node", "3"), {"parallel": {"tp": 2}}, "start 2 or 4 processes"),
        (
            (),
            {"model": {"config": {**LLAMA, "hiden_size": 4}}},
            "model.config.hiden_size = 4: a 'llama' configuration has no such field; use",
        ),
        (("--steps", "0"), {}, "--steps 0: at least one step"),
        (("--tolerance", "0"), {}, "--tolerance 0.0: not a positive number"),
        (("--device", "cuda", "--nproc-per-node", "64"), {}, "64 processes need a GPU each"),
        (("--set", "zero_optimization.stage=7"), {}, "zero_optimization.stage"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_input(tmp_path, monkeypatch, capsys, arguments, changes, told):
    """Refused before any process, in a sentence, with exit code 2."""
    file = {name: value for name, value in {**FILE, **changes}.items() if value is not None}
    (tmp_path / "run.json").write_text(json.dumps(file))
    monkeypatch.setattr(
        "plait.cli.launch.run", lambda *_, **__: pytest.fail("processes were started")
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path / "run.json"), *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def work_nothing():
    """Not a model."""
    return "model"


class Counted(PlainModel):
    """Indexes its blocks."""

    def forward(self, input_ids, side=False):
        hidden = self.embed(input_ids)
        for index in range(3):
            hidden = self.blocks[index](hidden, side)
        return self.head(hidden)


def counted():
    """A model that cannot lose a block."""
    return Counted(tied=False)


@pytest.mark.parametrize(
    ("parallel", "stage", "expected"),
    [
        ({}, 0, (1, 2, 1, 1, 1)),
        ({}, 2, (1, 1, 2, 1, 1)),
        ({"tp": 2}, 0, (1, 2, 1, 1, 2)),
        ({"tp": 2, "dp_shard": 64}, 3, (1, 1, 2, 1, 2)),
        ({"dp_replicate": 2}, 3, (1, 2, 2, 1, 1)),
        ({"dp_shard": 3}, 3, (1, 1, 3, 1, 1)),
    ],
)
def test_layout(parallel, stage, expected):
    """Degrees of tensor parallelism stay; open data-parallel degrees are 2; given ones shrink where they would need too many processes."""
    plan = planned(processes=None, parallel=parallel, zero_optimization={"stage": stage})  # type: ignore[arg-type]
    assert tuple(plan.resolved.layout.degrees.values()) == expected
    assert any("dp_shard 64 -> 2" in line for _, line in plan.lines) == (
        parallel.get("dp_shard") == 64
    )


def test_what_shrinks_and_what_stays():
    """The float64 pass keeps every mechanism of mixed precision."""
    plan = planned(
        fp16={"enabled": True},
        gradient_accumulation_steps=16,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
    )
    assert (plan.resolved.batch.micro_batch_size, plan.resolved.batch.accumulation) == (2, 3)
    assert plan.resolved.scheduler is None
    told = "\n".join(line for _, line in plan.lines)
    assert (
        "gradient_accumulation_steps 16 -> 3" in told
        and "WarmupLR is left out" in told
        and "initial_scale_power 16 -> 12" in told
    )
    wide, dtype = plan.settings("float64")
    assert dtype == torch.float64
    assert (wide.precision.compute, wide.precision.reduction, wide.precision.loss_scale) == (
        "float64",
        "float64",
        plan.resolved.precision.loss_scale,
    )
    assert plan.settings("configured") == (plan.resolved, torch.float32)


def test_a_schedule_that_needs_many_micro_batches():
    """As many as it takes at least are left."""
    parallel = {"pp": 2, "pipeline": {"schedule": "dualpipev"}}
    plan = planned(
        processes=2,
        parallel=parallel,
        gradient_accumulation_steps=16,
        zero_optimization={"stage": 1},
    )
    assert plan.resolved.batch.accumulation == 4


def test_buckets_shrink_with_the_model():
    """A small model in one bucket of 25 MiB would not show a wrong order of buckets."""
    plan = planned()
    model = plan.build(torch.float64).model
    largest = sum(p.numel() * p.element_size() for p in model.parameters())
    assert plan.resolved.data_parallel.bucket_bytes < largest / 3


def test_data_is_uneven():
    """Lengths, targets, one micro-batch without any."""
    plan = planned()
    data = plan.data(plan.build(torch.float64))
    assert [len(step) for step in data] == [4, 4]
    pieces = [piece for step in data for piece in step]
    assert len({piece["input_ids"].shape for piece in pieces}) > 2
    weights = [int(plait.causal_lm_loss.weight(piece)) for piece in pieces]
    assert weights[1] == 0 and len(set(weights)) > 3
    masks = [mask for piece in pieces for mask in piece["attention_mask"]]
    assert len({int(mask.sum()) for mask in masks}) > 3
    assert any(not mask[0] for mask in masks) and any(not mask[-1] for mask in masks), (
        "padded on the left, and on the right"
    )
    again = plan.data(plan.build(torch.float64))
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(data[1], again[1], strict=True)
    )
