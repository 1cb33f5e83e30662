"""Both sides get the same work, ranks that share a slice see the same data, and the report says what is above the target."""

import json

import pytest
import torch
from torch import nn

from benchmarks.pipeline_step import BENCHMARK
from benchmarks.steps import report
from benchmarks.steps.command import main
from benchmarks.steps.model_parallel_peers import LlamaStage, next_token_loss
from benchmarks.steps.plait_entry import configuration
from benchmarks.steps.rounds import Pace, Record
from benchmarks.steps.workload import Workload, batch, build_model
from plait.config.resolving.resolve import load, resolve

SIZES = {"layers": 3, "hidden": 32, "intermediate": 48, "heads": 2, "vocabulary": 256}
SMALL = Workload(**SIZES, sequence=24, micro_batch=1, micro_batches=2)


def test_ranks_of_a_slice_share_a_batch_and_slices_do_not():
    work = Workload(sequence=24, micro_batch=2, micro_batches=3, ranks=4, ranks_per_slice=2)
    seen = [batch(work, step=5, rank=rank)["input_ids"] for rank in range(4)]
    assert seen[0].shape == (6, 24)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])
    assert work.tokens_per_step == 2 * 6 * 23


def test_the_hand_written_stages_are_the_model():
    pytest.importorskip("transformers")
    model = build_model(SMALL)
    ids = batch(SMALL, step=0, rank=0)
    expected = model(input_ids=ids["input_ids"], labels=ids["labels"]).loss
    stages = [LlamaStage(model, blocks=blocks, layers=3) for blocks in (range(2), range(2, 3))]
    found = next_token_loss(nn.Sequential(*stages)(ids["input_ids"]), ids["labels"])
    torch.testing.assert_close(found, expected)
    first, last = ([name for name, _ in stage.named_children()] for stage in stages)
    assert first == ["embed_tokens", "layers", "rotary_emb"]
    assert last == ["layers", "rotary_emb", "norm", "lm_head"]


@pytest.mark.parametrize("scene", BENCHMARK.scenes, ids=lambda scene: scene.name)
def test_plait_is_configured_for_the_same_work(scene):
    work = Workload(**scene.sizes, clip=0.5)
    plait = next(one for one in scene.baselines if one.name.startswith("plait-"))
    resolved = resolve(load(configuration(work, **plait.options)), world_size=work.ranks)
    assert resolved.layout.dp == work.ranks // work.ranks_per_slice
    assert resolved.batch.micro_batch_size == work.micro_batch
    assert resolved.batch.accumulation == work.micro_batches
    assert resolved.gradient_clipping == 0.5
    assert resolved.layout.pp == 1 or resolved.pipeline.blocks_per_stage == (3, 3)


def record(losses, seconds):
    numbers = {"losses": losses, "norms": [1.0, 1.0], "peak_bytes": 2**30}
    foreign = [0.0] * len(seconds)
    return Record(seconds=seconds, foreign=foreign, processor_seconds=[0.9], **numbers)


@pytest.mark.parametrize(
    ("plait", "losses", "said"),
    [(1.0, [5.0, 4.0], "within"), (1.2, [5.0, 4.0], "ABOVE"), (1.0, [5.0, 3.0], "DISAGREES")],
)
def test_the_report_lists_what_misses_the_target(plait, losses, said):
    scene = BENCHMARK.scenes[0]
    records = {one.name: record([5.0, 4.0], [1.0, 2.0, None]) for one in scene.baselines}
    records["plait-1f1b"] = record(losses, [plait, 2 * plait, 3.0])
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
        scene,
        machine=machine,
        workload=SMALL,
        pace=Pace(),
        records=records,
        phases={},
        skipped={},
    )
    found = json.loads(json.dumps(found))
    assert found["baselines"]["plait-1f1b"]["ratios"]["raw torch"]["median"] == pytest.approx(plait)
    assert said in report.page(BENCHMARK, [found]) and report.is_good(found) is (
        said != "DISAGREES"
    )


def test_a_wrong_argument_exits_with_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(BENCHMARK, ["--scenes", "3d"])
    assert stopped.value.code == 2 and "invalid choice: '3d'" in capsys.readouterr().err


@pytest.mark.proof
def test_both_layouts_run_and_agree():
    """Real worker groups, a model of two small blocks."""
    pytest.importorskip("transformers")
    assert main(BENCHMARK, ["--quick"]) == 0
