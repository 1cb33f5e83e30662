"""What experts on different ranks are refused with, by name and before any process group, and what of the layout follows from ep."""

import pytest
import torch

from plait.cluster.layout import AXES, Layout
from plait.config.resolving.resolve import load, resolve
from plait.config.resolving.resolved_parts import smallest_world
from plait.errors import ConfigError, ModelError, PlaitError
from plait.model.blocks import find_blocks
from plait.parallel.order import check_all
from plait.parallel.parameter_layout import Reduction
from tests.parity import cases
from tests.parity.experts import Case, build


def check(parallel, *, family="mixtral", world=4, stage=0, kind="eager", **more):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, **more.pop("zero", {})},
        "parallel": parallel,
    }
    with torch.device("meta"):
        model = (
            cases.build(family, tied=False)
            if family == "llama"
            else build(Case(family), device="meta")
        )
    model.config.model_type = more.pop("model_type", model.config.model_type)
    if family != "llama":
        model.config._experts_implementation_internal = kind
    resolved = resolve(load({**config, **more}), world_size=world)
    check_all(resolved.context(model=model, blocks=find_blocks(model)))


REFUSED = [
    ({"ep": 3}, {}, r"parallel.ep = 3: .*dp_replicate 4 x dp_shard 1 = 4, and 4 % 3 = 1; use a divisor of 4, such as 1"),
    ({"ep": 8}, {"world": 8}, r"parallel.ep = 8: .* of the 4 experts of model.layers.0.mlp.experts, and 4 % 8 = 4; use 1, 2, 4"),
    ({"ep": 2}, {"family": "llama"}, "parallel.ep = 2: LlamaForCausalLM has no experts that are supported"),
    (
        {"ep": 2, "tp": 2, "plan": {"lm_head": "colwise_gather_output"}},
        {"model_type": "olmoe"},
        r"parallel.ep with parallel.tp = 2: MixtralForCausalLM \(model_type 'olmoe'\) is not among .* mixtral, qwen2_moe, qwen3_moe",
    ),
    ({"ep": 3, "cp": 2}, {}, r"processes of a pipeline stage, dp_replicate 2 x dp_shard 1 x cp 2 = 4, and 4 % 3 = 1; use a divisor of 4"),
    (
        {"tp": 2, "sequence_parallel": True, "plan": {"model.layers.*.self_attn.*_proj": "colwise_gather_output"}},
        {"model_type": "olmoe"},
        "parallel.sequence_parallel = true: model.layers.0.self_attn has no row-split layer",
    ),
    ({"ep": 2, "pp": 2, "pipeline": {"schedule": "zbv"}}, {}, "it computes a backward in two parts, which is not supported for the exchange"),
    ({"ep": 2}, {"bf16": {"enabled": True}}, "ZeRO stage 0 uses torch's sharding to compute in bfloat16"),
    ({"ep": 2}, {"stage": 1, "fp16": {"enabled": True}}, "fp16 with its loss scale is not tested"),
    ({"ep": 2}, {"compile": {"enabled": True}}, "compile.enabled is not tested"),
    (
        {"ep": 2, "tp": 4},
        {"stage": 2, "zero": {"offload_optimizer": {"device": "nvme", "nvme_path": "x"}}},
        "only states of shards are offloaded, and parallel.dp_shard is 1; set parallel.dp_shard to 2 or more",
    ),
    ({"ep": 2, "compress_gradients": "int8"}, {"stage": 1}, "compressed messages are not tested"),
    ({"ep": 2, "recompute": {"budget_gib": 1, "sequence_length": 8}}, {}, "counts the activations of all experts on every rank"),
    ({"ep": 2, "secondary_partition": 2}, {"stage": 3}, "parallel.secondary_partition is not tested"),
    ({"ep": 2, "optimizer_in_backward": True}, {"stage": 1, "gradient_clipping": 0}, "parallel.optimizer_in_backward is not tested|accum"),
    ({"ep": 2}, {"kind": "sonicmoe"}, "computes experts with 'sonicmoe', which is not tested"),
]  # fmt: skip


@pytest.mark.parametrize(("parallel", "more", "message"), REFUSED)
def test_refused(parallel, more, message):
    with pytest.raises(PlaitError, match=message) as error:
        check(parallel, **more)
    assert isinstance(error.value, ConfigError | ModelError)


def test_not_refused():
    for stage in (0, 1, 2, 3):
        check({"ep": 2}, stage=stage)
        check({"ep": 2, "pp": 2}, stage=stage)
        check({"ep": 4, "tp": 2}, stage=stage)
        check({"ep": 4, "tp": 2, "sequence_parallel": True}, stage=stage)
        check({"ep": 4, "cp": 2}, stage=stage)
    check({"ep": 4}, stage=1, bf16={"enabled": True})


LAYOUTS = (
    Layout(dp_replicate=8, ep=4),
    Layout(pp=2, dp_shard=4, tp=2, ep=2),
    Layout(dp_shard=6, ep=6),
    Layout(dp_shard=2, cp=2, tp=3, ep=4),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_second_view(layout):
    """Neighbouring ranks have different experts; a rank is found by either view; one of all replicas counts and writes."""
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for rank, at in enumerate(places):
        assert at["edp"] * layout.ep + at["ep"] == rank % layout.stage_ranks
        assert layout.rank(**{axis: at[axis] for axis in ("pp", "edp", "ep")}) == rank
        assert layout.rank(**{axis: at[axis] for axis in AXES}) == rank
    for sharded, parts in (
        (("ep",), layout.ep),
        (("edp", "ep"), layout.stage_ranks),
        ((), 1),
        (("dp_shard",), layout.dp_shard),
    ):
        counted = [rank for rank, at in enumerate(places) if Reduction(sharded).counts_in_norm(at)]
        assert len(counted) == parts * layout.pp
        assert counted == [
            rank for rank, at in enumerate(places) if Reduction(sharded).is_written_by(at)
        ]


def test_smallest_world():
    for parallel, least in (
        ({"ep": 4}, 4),
        ({"ep": 4, "pp": 2}, 8),
        ({"ep": 4, "dp_replicate": 6}, 12),
        ({"ep": 2, "tp": 2}, 2),
        ({"ep": 4, "cp": 2}, 4),
    ):
        assert smallest_world(load({"parallel": parallel}).parallel) == least
