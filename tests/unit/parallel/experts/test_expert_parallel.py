"""Refusals of expert parallelism before any process group exists, and its mesh dimensions."""

import pytest
import torch

from plait.cluster.layout import AXES, Layout
from plait.config.resolving.resolve import load, resolve
from plait.config.resolving.resolved_parts import smallest_world
from plait.errors import ConfigError, ModelError
from plait.model.blocks import find_blocks
from plait.parallel.order import check_all
from plait.parallel.parameter_layout import Reduction
from tests.parity import cases
from tests.parity.experts import Case, build

SPLIT_ATTENTION = {"model.layers.*.self_attn.*_proj": "colwise_gather_output"}
BUDGET = {"budget_gib": 1, "sequence_length": 8}
NVME_STATES = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "x"}}


def check(parallel, *, family="mixtral", world=4, zero=0, kind="eager", model_type=None, **config):
    """Check a model of the family. `zero` is the ZeRO stage or the section of the file."""
    if family == "llama":
        with torch.device("meta"):
            model = cases.build(family, tied=False)
    else:
        model = build(Case(family), device="meta")
        model.config._experts_implementation_internal = kind
    model.config.model_type = model_type or model.config.model_type
    file = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": zero} if isinstance(zero, int) else zero,
        "parallel": parallel,
        **config,
    }
    resolved = resolve(load(file), world_size=world)
    check_all(resolved.context(model=model, blocks=find_blocks(model)))


REFUSED = [
    ({"ep": 3}, {}, "parallel.ep = 3: .* = 4, and 4 % 3 = 1; use a divisor of 4, such as 1"),
    ({"ep": 8}, {"world": 8}, "parallel.ep = 8: .* 4 experts .*, and 4 % 8 = 4; use 1, 2, 4"),
    ({"ep": 2}, {"family": "llama"}, "ep = 2: LlamaForCausalLM has no experts that are supported"),
    (
        {"ep": 2, "tp": 2, "plan": {"lm_head": "colwise_gather_output"}},
        {"model_type": "olmoe"},
        r"parallel.ep with parallel.tp = 2: .*\(model_type 'olmoe'\) is not among .* mixtral",
    ),
    ({"ep": 3, "cp": 2}, {}, "dp_shard 1 x cp 2 = 4, and 4 % 3 = 1; use a divisor"),
    (
        {"tp": 2, "sequence_parallel": True, "plan": SPLIT_ATTENTION},
        {"model_type": "olmoe"},
        "parallel.sequence_parallel = true: model.layers.0.self_attn has no row-split layer",
    ),
    ({"ep": 2, "pp": 2, "pipeline": {"schedule": "zbv"}}, {}, "computes a backward in two parts"),
    ({"ep": 2}, {"bf16": {"enabled": True}}, "ZeRO stage 0 uses torch's sharding to compute in bf"),
    ({"ep": 2}, {"zero": 1, "fp16": {"enabled": True}}, "fp16 with its loss scale is not tested"),
    ({"ep": 2}, {"compile": {"enabled": True}}, "compile.enabled is not tested"),
    ({"ep": 2, "tp": 4}, {"zero": NVME_STATES}, "states of shards .*; set parallel.dp_shard to 2"),
    ({"ep": 2, "compress_gradients": "int8"}, {"zero": 1}, "compressed messages are not tested"),
    ({"ep": 2, "recompute": BUDGET}, {}, "counts the activations of all experts on every rank"),
    ({"ep": 2, "secondary_partition": 2}, {"zero": 3}, "secondary_partition is not tested"),
    (
        {"ep": 2, "optimizer_in_backward": True},
        {"zero": 1, "gradient_clipping": 0},
        "parallel.optimizer_in_backward is not tested|accum",
    ),
    ({"ep": 2}, {"kind": "sonicmoe"}, "computes experts with 'sonicmoe', which is not tested"),
]


@pytest.mark.parametrize(("parallel", "settings", "message"), REFUSED)
def test_refused(parallel, settings, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        check(parallel, **settings)


def test_accepted():
    for stage in (0, 1, 2, 3):
        check({"ep": 2}, zero=stage)
        check({"ep": 2, "pp": 2}, zero=stage)
        check({"ep": 4, "tp": 2}, zero=stage)
        check({"ep": 4, "tp": 2, "sequence_parallel": True}, zero=stage)
        check({"ep": 4, "cp": 2}, zero=stage)
    check({"ep": 4}, zero=1, bf16={"enabled": True})


LAYOUTS = (
    Layout(dp_replicate=8, ep=4),
    Layout(pp=2, dp_shard=4, tp=2, ep=2),
    Layout(dp_shard=6, ep=6),
    Layout(dp_shard=2, cp=2, tp=3, ep=4),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dimensions_of_experts_and_of_all_others(layout):
    """A rank has coordinates in both meshes. Neighbouring ranks have different experts."""
    coordinates = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for rank, place in enumerate(coordinates):
        assert place["edp"] * layout.ep + place["ep"] == rank % layout.stage_ranks
        for axes in (("pp", "edp", "ep"), AXES):
            assert layout.rank(**{axis: place[axis] for axis in axes}) == rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_replica_counts_in_the_norm_and_writes(layout):
    coordinates = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for sharded_axes, shards in (
        (("ep",), layout.ep),
        (("edp", "ep"), layout.stage_ranks),
        ((), 1),
        (("dp_shard",), layout.dp_shard),
    ):
        reduction = Reduction(sharded_axes)
        counting = [place for place in coordinates if reduction.counts_in_norm(place)]
        assert len(counting) == shards * layout.pp
        assert counting == [place for place in coordinates if reduction.is_written_by(place)]


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"ep": 4}, 4),
        ({"ep": 4, "pp": 2}, 8),
        ({"ep": 4, "dp_replicate": 6}, 12),
        ({"ep": 2, "tp": 2}, 2),
        ({"ep": 4, "cp": 2}, 4),
    ],
)
def test_smallest_world(parallel, expected):
    assert smallest_world(load({"parallel": parallel}).parallel) == expected
