"""Pipelines of Plait and torch get the same work, and the report lists what misses the target."""

import pytest
import torch
from torch import nn

from benchmarks.pipeline_step import BENCHMARK
from benchmarks.steps import report
from benchmarks.steps.command import main
from benchmarks.steps.model_parallel_peers import LlamaStage, next_token_loss
from benchmarks.steps.plait_entry import configuration
from benchmarks.steps.workload import Workload, batch, build_model
from plait.config.resolving.resolve import load, resolve
from tests.unit.benchmarks.records import make_document, record

SIZES = {"layers": 3, "hidden": 32, "intermediate": 48, "heads": 2, "vocabulary": 256}
SMALL = Workload(**SIZES, sequence=24, micro_batch=1, micro_batches=2)


def test_ranks_of_a_slice_share_a_batch_and_slices_do_not():
    work = Workload(sequence=24, micro_batch=2, micro_batches=3, ranks=4, ranks_per_slice=2)
    ids = [batch(work, step=5, rank=rank)["input_ids"] for rank in range(4)]
    assert ids[0].shape == (6, 24)
    assert torch.equal(ids[0], ids[1]) and torch.equal(ids[2], ids[3])
    assert not torch.equal(ids[0], ids[2])
    assert work.tokens_per_step == 2 * 6 * 23


def test_the_hand_written_stages_are_the_model():
    pytest.importorskip("transformers")
    model = build_model(SMALL)
    ids = batch(SMALL, step=0, rank=0)
    expected = model(input_ids=ids["input_ids"], labels=ids["labels"]).loss
    stages = [LlamaStage(model, blocks=blocks, layers=3) for blocks in (range(2), range(2, 3))]
    loss = next_token_loss(nn.Sequential(*stages)(ids["input_ids"]), ids["labels"])
    torch.testing.assert_close(loss, expected)
    first, last = stages
    assert list(dict(first.named_children())) == ["embed_tokens", "layers", "rotary_emb"]
    assert list(dict(last.named_children())) == ["layers", "rotary_emb", "norm", "lm_head"]


@pytest.mark.parametrize("scene", BENCHMARK.scenes, ids=lambda scene: scene.name)
def test_plait_is_configured_for_the_same_work(scene):
    work = Workload(**scene.sizes, clip=0.5)
    plait = next(entry for entry in scene.baselines if entry.name.startswith("plait-"))
    resolved = resolve(load(configuration(work, **plait.options)), world_size=work.ranks)
    assert resolved.layout.dp == work.ranks // work.ranks_per_slice
    assert resolved.batch.micro_batch_size == work.micro_batch
    assert resolved.batch.accumulation == work.micro_batches
    assert resolved.gradient_clipping == 0.5
    assert resolved.layout.pp == 1 or resolved.pipeline.blocks_per_stage == (3, 3)


@pytest.mark.parametrize(
    ("plait", "losses", "verdict"),
    [(1.0, [5.0, 4.0], "within"), (1.2, [5.0, 4.0], "ABOVE"), (1.0, [5.0, 3.0], "DISAGREES")],
)
def test_the_report_lists_what_misses_the_target(plait, losses, verdict):
    scene = BENCHMARK.scenes[0]
    reference = record([5.0, 4.0], [1.0, 2.0, None])
    records = {baseline.name: reference for baseline in scene.baselines}
    records["plait-1f1b"] = record(losses, [plait, 2 * plait, 3.0])
    document = make_document(BENCHMARK, scene, SMALL, records)
    ratios = document["baselines"]["plait-1f1b"]["ratios"]
    assert ratios["raw torch"]["median"] == pytest.approx(plait)
    assert verdict in report.page(BENCHMARK, [document])
    assert report.is_good(document) is (verdict != "DISAGREES")


@pytest.mark.proof
def test_both_layouts_run_and_agree():
    pytest.importorskip("transformers")
    assert main(BENCHMARK, ["--quick"]) == 0
