"""All baselines get the same work, and the report names disagreement and what was left out."""

import math

import pytest
import torch

from benchmarks.common import load
from benchmarks.steps import agreement, command, deepspeed_peer, report, rounds
from benchmarks.steps.baselines import beside
from benchmarks.steps.plait_entry import configuration
from benchmarks.steps.rounds import Pace, Record
from benchmarks.steps.workload import ALPHABET, Workload, batch, build_model
from benchmarks.training_step import BENCHMARK
from tests.unit.benchmarks.records import make_document, record

SMALL = Workload(layers=2, hidden=32, intermediate=48, heads=2, vocabulary=256, sequence=24)


def test_the_model_has_the_counted_parameters_and_repeats():
    pytest.importorskip("transformers")
    model = build_model(SMALL)
    assert sum(parameter.numel() for parameter in model.parameters()) == SMALL.parameters
    torch.testing.assert_close(build_model(SMALL).state_dict(), model.state_dict(), rtol=0, atol=0)


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
        names = {baseline.name for baseline in scene.baselines}
        for baseline in scene.baselines:
            assert set(baseline.against.values()) <= names
            assert set(baseline.against) <= set(BENCHMARK.columns)


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
    comparison = agreement.compare(record(losses, norms=norms), record([5.0, 4.0]))
    assert comparison["holds"] is holds


def test_late_steps_may_drift_but_not_far():
    norms = [1.0] * 20
    reference = record([5.0] * 20, norms=norms)
    for last, holds in ((5.01, True), (5.1, False)):
        late = record([5.0] * 19 + [last], norms=norms)
        assert agreement.compare(late, reference)["holds"] is holds


def document_of(records, stage=0):
    skipped = {"deepspeed-0": "deepspeed is not installed"}
    return make_document(BENCHMARK, BENCHMARK.scenes[stage], SMALL, records, skipped)


def test_the_report_pairs_rounds():
    document = document_of(
        {
            "ddp": record([5.0, 4.0], seconds=[1.0, 2.0, None]),
            "plait-0": record([5.0, 4.0], seconds=[1.1, 2.2, 3.0]),
        }
    )
    ratios = document["baselines"]["plait-0"]["ratios"]
    assert ratios["DDP"]["median"] == pytest.approx(1.1) and ratios["DDP"]["count"] == 2
    assert ratios["raw torch"] == ratios["DDP"] and "DeepSpeed" not in ratios
    assert "1.100 [1.100, 1.100]" in report.page(BENCHMARK, [document])


def test_the_report_names_what_was_left_out_or_failed():
    failed = Record(failure="fsdp-kept: rank 0 died")
    document = document_of({"ddp": record([5.0, 4.0]), "fsdp-kept": failed}, stage=2)
    page = report.page(BENCHMARK, [document])
    assert "deepspeed-0 was left out: deepspeed is not installed" in page
    assert "fsdp-kept failed: fsdp-kept: rank 0 died" in page
    assert not report.is_good(document)


def test_an_engine_that_disagrees_is_named():
    records = {"ddp": record([5.0, 4.0]), "plait-0": record([5.0, 3.0])}
    page = report.page(BENCHMARK, [document_of(records)])
    assert "plait-0 DISAGREES" in page and "agree: by" not in page


class FakeTeam:
    """Team that answers turns without processes."""

    pids = ()

    def ask(self, message, *, timeout_seconds):
        _, arguments = message
        count = arguments["warm"] + arguments["steps"]
        answers = []
        for rank in (0, 1):
            numbers = {"losses": [float(rank)] * count, "norms": [1.0] * count, "peak_bytes": 1}
            answers.append({"seconds": 1.0 + rank, "processor_seconds": 1.0, **numbers})
        return answers


def test_disturbed_turns_are_repeated_then_left_out(monkeypatch):
    # Shares of the processor that other programs take during each turn, instead of measured ones.
    shares = iter([0.5, 0.0, 0.5, 0.5, 0.0])
    monkeypatch.setattr(load.ForeignMeter, "start", lambda self: None)
    monkeypatch.setattr(load.ForeignMeter, "stop", lambda self: next(shares))
    monkeypatch.setattr(load, "wait_for_quiet", lambda **_: True)
    pace = Pace(rounds=3, steps=1, warm=1, repeats=1)
    baselines = {"ddp": BENCHMARK.scenes[0].baselines[0]}
    (result,) = rounds.run({"ddp": FakeTeam()}, baselines, pace=pace).values()
    # Seconds of the slower rank. The second round was disturbed twice.
    assert result.seconds == [2.0, None, 2.0]
    # Losses are means over ranks. Those of disturbed turns count too.
    assert result.losses == [0.5] * 10


def test_a_wrong_argument_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(BENCHMARK, ["--baselines", "dpp"])
    assert stopped.value.code == 2 and "invalid choice: 'dpp'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        command.main(BENCHMARK, ["--beside", "no_such_folder"])
    assert stopped.value.code == 2 and "no_such_folder has no src/plait" in capsys.readouterr().err


def test_another_checkout_is_measured_beside_this_one(tmp_path):
    package = tmp_path / "older/src/plait"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the older Plait')")
    scene = beside(BENCHMARK, tmp_path / "older").scenes[2]
    older, ours = scene.baselines[-2:]
    assert (older.name, ours.name) == ("beside-plait-2", "plait-2")
    assert older.against == BENCHMARK.scenes[2].baselines[-1].against
    assert ours.against["Plait of older"] == older.name

    groups = {}
    failures = command.start_groups({older.name: older}, groups, workload=SMALL, logs=tmp_path)
    assert not groups and "the older Plait" in failures[older.name]


@pytest.mark.parametrize(
    ("program", "timeout_seconds", "expected"),
    [
        ("pass", 60, "None"),
        ("raise OSError('no compiler')", 60, "do not compile: OSError: no compiler"),
        ("import time; time.sleep(60)", 2, "took more than 2 s; a build that was killed leaves"),
    ],
)
def test_deepspeeds_compilation_ends_with_a_reason(monkeypatch, program, timeout_seconds, expected):
    # The compilation itself takes minutes.
    monkeypatch.setattr(deepspeed_peer, "_COMPILE", program)
    assert expected in str(deepspeed_peer.prepare(timeout_seconds=timeout_seconds))


def test_only_shared_memory_of_this_run_is_removed(monkeypatch, tmp_path):
    prefix = "deepspeed_allreduce_buffer_0_host_"
    names = {f"{prefix}1234_0", f"{prefix}5678_0", "torch_5678_0"}
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(deepspeed_peer, "SHARED_MEMORY", tmp_path)
    assert deepspeed_peer.clean(ports=[5678]) == [f"{prefix}5678_0"]
    assert {path.name for path in tmp_path.iterdir()} == names - {f"{prefix}5678_0"}
