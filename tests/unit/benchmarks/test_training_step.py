"""The workload is the same for everybody, disagreement is found, and the report says what was left out."""

import json
import math

import pytest
import torch

from benchmarks.common import load
from benchmarks.steps import agreement, command, deepspeed_peer, report, rounds
from benchmarks.steps.plait_entry import configuration
from benchmarks.steps.rounds import Pace, Record
from benchmarks.steps.workload import ALPHABET, Workload, batch, build_model
from benchmarks.training_step import BENCHMARK

SMALL = Workload(layers=2, hidden=32, intermediate=48, heads=2, vocabulary=256, sequence=24)


def test_the_model_has_the_counted_parameters_and_repeats():
    pytest.importorskip("transformers")
    one, two = build_model(SMALL), build_model(SMALL)
    assert sum(p.numel() for p in one.parameters()) == SMALL.parameters
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_the_default_model_is_that_of_the_documentation():
    assert round(Workload().parameters / 1e6, 1) == 24.5


def test_a_batch_depends_on_step_and_rank_only():
    first = batch(SMALL, step=3, rank=1)
    assert torch.equal(first["input_ids"], batch(SMALL, step=3, rank=1)["input_ids"])
    for other in (batch(SMALL, step=4, rank=1), batch(SMALL, step=3, rank=0)):
        assert not torch.equal(first["input_ids"], other["input_ids"])
    assert first["input_ids"].shape == (SMALL.micro_batch, SMALL.sequence)
    assert int(first["input_ids"].max()) < ALPHABET


def test_plait_gets_the_hyperparameters_of_the_workload():
    config = configuration(SMALL, stage=2)
    assert config["optimizer"]["params"]["betas"] == list(SMALL.betas)
    assert config["gradient_clipping"] == SMALL.clip
    assert config["train_micro_batch_size_per_gpu"] == SMALL.micro_batch


def test_every_comparison_names_a_baseline():
    for scene in BENCHMARK.scenes:
        names = {one.name for one in scene.baselines}
        for one in scene.baselines:
            assert {*one.against.values()} <= names
            assert {*one.against} <= {*BENCHMARK.columns}


def record(losses, norms=(1.0, 1.0), seconds=(1.0, 1.0)):
    numbers = {"losses": list(losses), "norms": list(norms), "peak_bytes": 2**30}
    foreign = [0.0] * len(seconds)
    return Record(seconds=list(seconds), foreign=foreign, processor_seconds=[0.9], **numbers)


@pytest.mark.parametrize(
    ("losses", "norms", "holds"),
    [
        ([5.0, 4.0], [1.0, 1.0], True),
        ([5.0, 4.00001], [1.0, 1.00001], True),
        ([5.0, 4.001], [1.0, 1.0], False),
        ([5.0, 4.0], [1.0, 2.0], False),
        ([5.0, math.nan], [1.0, 1.0], False),
        ([5.0, 4.0], [1.0, math.nan], False),
        ([5.0, 4.0], [None, None], True),
        ([], [], False),
    ],
)
def test_a_baseline_that_computes_something_else_is_found(losses, norms, holds):
    assert agreement.compare(record(losses, norms), record([5.0, 4.0]))["holds"] is holds


def test_late_steps_may_drift_but_not_far():
    reference = record([5.0] * 20, [1.0] * 20)
    assert agreement.compare(record([5.0] * 19 + [5.01], [1.0] * 20), reference)["holds"]
    assert not agreement.compare(record([5.0] * 19 + [5.1], [1.0] * 20), reference)["holds"]


def document(stage=0, **records):
    machine = {
        "date": "2026-01-01",
        "cpu": "a cpu",
        "cores": 2,
        "memory_bytes": 2**34,
        "python": "3.11",
        "versions": {"torch": "2"},
    }
    found = report.document(
        BENCHMARK,
        BENCHMARK.scenes[stage],
        machine=machine,
        workload=SMALL,
        pace=Pace(),
        records={name.replace("_", "-"): record for name, record in records.items()},
        phases={},
        skipped={"deepspeed-0": "deepspeed is not installed"},
    )
    return json.loads(json.dumps(found))


def test_the_report_pairs_rounds_and_survives_json():
    found = document(
        ddp=record([5.0, 4.0], seconds=[1.0, 2.0, None]),
        plait_0=record([5.0, 4.0], seconds=[1.1, 2.2, 3.0]),
    )
    ratios = found["baselines"]["plait-0"]["ratios"]
    assert ratios["DDP"]["median"] == pytest.approx(1.1) and ratios["DDP"]["count"] == 2
    assert ratios["raw torch"] == ratios["DDP"] and "DeepSpeed" not in ratios
    assert "1.100 [1.100, 1.100]" in report.page(BENCHMARK, [found])


def test_nobody_is_left_out_silently():
    failed = Record(failure="fsdp-kept: rank 0 died")
    found = document(2, ddp=record([5.0, 4.0]), fsdp_kept=failed)
    page = report.page(BENCHMARK, [found])
    assert "deepspeed-0 was left out: deepspeed is not installed" in page
    assert "fsdp-kept failed: fsdp-kept: rank 0 died" in page
    assert not report.is_good(found)


def test_an_engine_that_disagrees_is_named():
    page = report.page(BENCHMARK, [document(ddp=record([5.0, 4.0]), plait_0=record([5.0, 3.0]))])
    assert "plait-0 DISAGREES" in page and "agree: by" not in page


class FakeTeam:
    """Team that answers turns without processes."""

    pids = ()

    def ask(self, message, *, timeout_seconds):
        _, arguments = message
        count = arguments["warm"] + arguments["steps"]
        shared = {"processor_seconds": 1.0, "norms": [1.0] * count, "peak_bytes": 1}
        return [
            {"seconds": 1.0 + rank, "losses": [float(rank)] * count, **shared} for rank in (0, 1)
        ]


def test_disturbed_turns_are_repeated_then_left_out(monkeypatch):
    shares = iter([0.5, 0.0, 0.5, 0.5, 0.0])
    monkeypatch.setattr(load.ForeignMeter, "start", lambda self: None)
    monkeypatch.setattr(load.ForeignMeter, "stop", lambda self: next(shares))
    monkeypatch.setattr(load, "wait_for_quiet", lambda **_: True)
    pace = Pace(rounds=3, steps=1, warm=1, repeats=1)
    baselines = {"ddp": BENCHMARK.scenes[0].baselines[0]}
    (seen,) = rounds.run({"ddp": FakeTeam()}, baselines, pace=pace).values()
    assert seen.seconds == [2.0, None, 2.0]  # the slower rank's; round 2 stayed disturbed
    assert (
        seen.losses == [0.5] * 10
    )  # every step counts for agreement, disturbed or not: mean over ranks


def test_a_wrong_argument_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(BENCHMARK, ["--baselines", "dpp"])
    assert stopped.value.code == 2 and "invalid choice: 'dpp'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("pass", None),
        ("raise OSError('no compiler')", "do not compile: OSError: no compiler"),
        ("import time; time.sleep(60)", "took more than 2 s; a build that was killed leaves a file named `lock`"),
    ],
)  # fmt: skip
def test_deepspeeds_compilation_ends_and_says_why(monkeypatch, program, expected):
    monkeypatch.setattr(deepspeed_peer, "_COMPILE", program)
    problem = deepspeed_peer.prepare(timeout_seconds=2 if "sleep" in program else 60)
    assert problem is None if expected is None else expected in problem


def test_only_shared_memory_of_this_run_is_removed(monkeypatch, tmp_path):
    prefix = "deepspeed_allreduce_buffer_0_host_"
    names = (f"{prefix}1234_0", f"{prefix}5678_0", "torch_5678_0")
    old, new, other = (tmp_path / name for name in names)
    for path in (old, new, other):
        path.touch()
    monkeypatch.setattr(deepspeed_peer, "SHARED_MEMORY", tmp_path)
    assert deepspeed_peer.clean(ports=[5678]) == [new.name]
    assert old.exists() and other.exists()
