"""Reports about data parallelism and ZeRO, each run on two processes and in one."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from tests.covers import cover
from tests.reports import autograd, parameters, steps
from tests.reports.runs import Result, Situation, differences, in_one_process, on_a_rank

TOLERANCE = 1e-10
LAYOUTS = [
    "engine-0",
    "engine-2",
    "engine-3",
    "engine-1-torch",
    "engine-3-torch",
    "own-0",
    "own-1",
    "own-3",
    "own-2-torch",
    "own-3-torch",
]
"""Mode, ZeRO stage, and torch's transport in place of shared memory, as between GPUs."""
OWN = [layout for layout in LAYOUTS if layout.startswith("own")]
SHARDED = [layout for layout in LAYOUTS if "-0" not in layout]
ENGINES = [layout for layout in LAYOUTS if layout.startswith("engine")]
TORCH = [layout for layout in LAYOUTS if layout.endswith("torch")]
UNREDUCED = "torch names a tensor without a gradient: parameters are shards outside of the forward"
MIXED = "torch's words about mixed tensors name neither the parameter nor the remedy"
FLATTENED = "torch's words about an operator on shards name neither the optimizer nor the remedy"
FREED = "the second backward reads a gathered weight whose memory the first one freed"


@dataclass(frozen=True)
class Case:
    """A public report.

    Attributes:
        report: Project and number.
        situation: The run.
        layouts: Where it runs.
        refused: Words of the refusal by layout, or for all layouts by "*".
        defects: Why a layout is not right, by layout.
        tolerance: Largest relative difference.
        parallel: Settings of the section `parallel`.
        world: Number of processes.
    """

    report: str
    situation: Situation
    layouts: list[str] = field(default_factory=lambda: LAYOUTS)
    refused: dict[str, str] = field(default_factory=dict)
    defects: dict[str, str] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    parallel: dict[str, Any] = field(default_factory=dict)
    world: int = 2


def on(layouts, text):
    """Return the same text for some layouts."""
    return dict.fromkeys(layouts, text)


CASES = [
    Case("pytorch-172543", autograd.gradient_penalty, defects=on(TORCH, FREED)),
    Case("pytorch-106637", autograd.two_losses_on_one_graph),
    Case("pytorch-136861", autograd.forwards_then_backwards),
    Case("pytorch-187437", autograd.two_forwards_of_checkpointed_layers),
    Case("fairscale-617", autograd.two_resolutions_through_checkpoints),
    Case("DeepSpeed-846", autograd.reentrant_checkpoints),
    Case(
        "pytorch-24005",
        autograd.checkpoint_sequential_with_a_penalty,
        defects=on(TORCH, FREED),
    ),
    Case("fairscale-967", autograd.three_outputs),
    Case("pytorch-80245", autograd.nested_outputs),
    Case("pytorch-173709", autograd.loss_of_a_cached_intermediate),
    Case("pytorch-183702", autograd.head_used_again),
    Case("pytorch-83107", autograd.encoders_take_turns),
    Case("pytorch-104504", autograd.evaluation_before_the_backward),
    Case("pytorch-113203", autograd.inference_mode_between),
    Case("pytorch-69031", autograd.branch_unused_in_the_last_micro_batch),
    Case("pytorch-79171", autograd.output_that_no_loss_uses),
    Case("pytorch-63740", autograd.backward_of_some_parameters, OWN),
    Case("GradCache-25", autograd.gradients_of_outputs_cached, OWN),
    Case("DeepSpeed-7913", autograd.per_sample_gradients_in_the_loss),
    Case(
        "DeepSpeed-7464",
        autograd.loss_reads_weights,
        refused=on(["engine-3", "engine-3-torch"], "is read by the loss itself"),
        defects=on(["own-3", "own-3-torch"], MIXED),
    ),
    Case(
        "higher-116",
        autograd.inner_step_by_functional_call,
        defects=on(SHARDED, UNREDUCED),
    ),
    Case(
        "pytorch-63929",
        autograd.gradients_of_parameters_asked_for,
        defects=on(SHARDED, UNREDUCED),
    ),
    Case(
        "pytorch-181832",
        autograd.views_changed_in_place,
        defects=on(
            ["engine-3-torch", "own-3-torch"],
            "an in-place change of a view that a block returned drops the hook that gathers",
        ),
    ),
    Case(
        "pytorch-181832-inputs",
        autograd.inputs_changed_in_place,
        defects=on(SHARDED, "a view of a unit's input cannot be changed in place; torch's words"),
    ),
    Case("pytorch-61519", autograd.hooks_on_activations),
    Case("pytorch-182641", autograd.tangents_of_the_forward),
    Case("torchtitan-734", autograd.hooks_on_gradients_of_modules),
    Case("pytorch-168143", autograd.objects_between_blocks),
    Case(
        "pytorch-47260",
        autograd.backward_through_the_last_call,
        defects=on(["engine-1-torch", "own-2-torch"], FREED),
    ),
    Case("fairscale-989", autograd.weights_perturbed_between_two_backwards, OWN),
    Case("pytorch-176076", parameters.tied_weights_of_uneven_shards),
    Case("pytorch-176076-three", parameters.tied_weights_of_uneven_shards, world=3),
    Case(
        "DeepSpeed-1945",
        parameters.first_and_last_layer_shared,
        refused=on(
            SHARDED,
            "put both modules into one module whose forward runs both and name that module in",
        ),
    ),
    Case(
        "DeepSpeed-1945-remedy",
        parameters.first_and_last_layer_shared,
        SHARDED,
        parallel={"blocks": ["layers"]},
    ),
    Case("accelerate-4171", parameters.blocks_used_twice),
    Case("pytorch-132934", parameters.scalar_parameter),
    Case("pytorch-144045", parameters.parameter_of_one_element),
    Case(
        "hyper-parallel-475",
        parameters.parameter_without_elements,
        refused=on(SHARDED, "has no elements"),
    ),
    Case("pytorch-185239", parameters.integer_parameters),
    Case(
        "pytorch-156784",
        parameters.two_dtypes_in_a_block,
        refused=on(SHARDED, "must have one dtype"),
        tolerance=1e-5,
    ),
    Case("pytorch-26596", parameters.embedding_with_max_norm, refused={"*": "use max_norm=None"}),
    Case(
        "DeepSpeed-1416",
        parameters.embedding_with_sparse_gradients,
        refused={"*": "build it with sparse=False"},
    ),
    Case("pytorch-33238", parameters.recurrent_blocks),
    Case("DeepSpeed-1045", parameters.parametrized_weights),
    Case("pytorch-137382", parameters.convolutions_in_channels_last),
    Case("torchtitan-1180", parameters.transposed_parameters),
    Case(
        "pytorch-126310",
        parameters.modules_with_two_names,
        refused=on(SHARDED, "are one parameter in two units"),
    ),
    Case("ColossalAI-5185", parameters.experts_without_tokens),
    Case("DeepSpeed-5812", parameters.buffers_of_other_dtypes),
    Case("pytorch-145281", parameters.methods_other_than_forward, defects=on(SHARDED, MIXED)),
    Case("transformers-39186", parameters.encoder_layers_of_torch),
    Case(
        "pytorch-103958",
        parameters.weights_masked_before_the_forward,
        refused=on(TORCH, "the model writes to this parameter"),
    ),
    Case("pytorch-103958-remedy", parameters.weights_masked_by_parametrize),
    Case("pytorch-158753", parameters.complex_parameters),
    Case(
        "pytorch-158753-uneven",
        parameters.complex_vector_of_uneven_shards,
        refused=on(SHARDED, "make its length a multiple of 2"),
    ),
    Case(
        "pytorch-158753-mixed",
        parameters.complex_and_real_parameters,
        refused=on(SHARDED, "must have one dtype"),
    ),
    Case("pytorch-162692", parameters.statistics_of_weights),
    Case(
        "pytorch-149138",
        parameters.averaged_model,
        refused=on(SHARDED, "copy the model before plait.initialize"),
    ),
    Case(
        "Megatron-LM-6087",
        parameters.weights_assigned,
        refused=on(SHARDED, "load_state_dict(assign=True)"),
    ),
    Case("DeepSpeed-7718", steps.clipped_accumulation),
    Case("ColossalAI-2496", steps.logits_after_accumulated_steps),
    Case("DeepSpeed-1823", steps.many_groups_of_adam),
    Case("DeepSpeed-6873", steps.groups_with_a_schedule),
    Case("DeepSpeed-1084", steps.weights_read_through_the_groups),
    Case("DeepSpeed-490", steps.layer_wise_optimizer),
    Case("pytorch-170862", steps.own_clipping, OWN),
    Case("accelerate-3807", steps.clipping_by_value, OWN),
    Case("DeepSpeed-1295", steps.adaptive_clipping, OWN),
    Case("pytorch-120879", steps.gradients_masked, OWN),
    Case("pytorch-92820", steps.gradients_combined_by_the_loop, OWN),
    Case("DeepSpeed-1767", steps.parameters_frozen_and_thawed),
    Case("lightning-19626", steps.two_optimizers_in_turn, OWN),
    Case("torchrec-4268", steps.hooks_after_accumulation, OWN),
    Case("pytorch-115710", steps.scaler_of_the_loop, OWN),
    Case(
        "lightning-8933",
        steps.group_added_later,
        refused={"own-0": "was frozen when plait.parallelize was called"},
    ),
    Case("DeepSpeed-5615", steps.states_dropped),
    Case(
        "DeepSpeed-2935",
        steps.closure_of_lbfgs,
        refused=on(ENGINES, "use an optimizer that needs one gradient per step"),
        defects=on([layout for layout in OWN if layout in SHARDED], FLATTENED),
    ),
    Case(
        "pytorch-109581",
        steps.factored_optimizer,
        refused=on(
            [layout for layout in ENGINES if layout in SHARDED], "takes norms of full parameters"
        ),
        defects=on([layout for layout in OWN if layout in SHARDED], FLATTENED),
    ),
    Case("pytorch-41101", steps.gradients_zeroed_in_place),
    Case("DeepSpeed-3830", steps.weights_clamped_after_the_step),
    Case("DeepSpeed-2056", steps.weights_loaded_between_steps),
    Case("DeepSpeed-6411", steps.weights_reloaded),
    Case(
        "accelerate-3256-loop",
        steps.optimizer_built_before_sharding,
        refused={
            layout: "build the optimizer over the parameters"
            if layout.startswith("engine")
            else "build the optimizer afterwards"
            for layout in SHARDED
        },
    ),
    Case("lightning-8531", steps.reduced_backward_fails),
    Case("lightning-8531-accumulating", steps.accumulating_backward_fails),
    Case("lightning-8531-first", steps.first_backward_fails),
    Case("lightning-8531-evaluation", steps.evaluation_after_failed_backward),
    Case(
        "lightning-8531-ignored",
        steps.step_after_failed_backward,
        OWN,
        refused={"*": "call optimizer.zero_grad() and run the next forward before the step"},
    ),
    Case("torchtitan-1329", steps.repeat_failed_forward),
    Case("DeeperSpeed-56", steps.weights_reloaded_in_bfloat16, tolerance=3e-2),
    Case("fairscale-918", steps.three_backwards_per_step),
    Case(
        "torchtitan-2318-own",
        steps.clipped_accumulation,
        ["own-3", "engine-2"],
        parallel={"dp_replicate": 2, "dp_shard": 2},
        world=4,
    ),
]


def runs():
    """Every case on every one of its layouts. Most are marked proof."""
    all_rows = [(case, layout) for case in CASES for layout in case.layouts]
    rows = cover(all_rows, features=features, cost=cost, name=named)
    parameters = []
    for row in rows:
        case, layout = row.values
        marks = [*row.marks]
        if layout in case.defects:
            marks.append(pytest.mark.xfail(strict=True, reason=case.defects[layout]))
        parameters.append(pytest.param(case, layout, id=row.id, marks=marks))
    return parameters


def features(case, layout):
    """Return the settings that have to meet in the tests that always run."""
    mode, stage, *transport = layout.split("-")
    return mode, stage, str(transport), case.situation.__module__


def cost(case, layout):
    """The processes. A worker that fails is started anew."""
    return case.world * (20.0 if layout in case.defects else 1.0)


def named(case, layout):
    return f"{case.report}-{layout}"


@cache
def plainly(situation, world):
    return in_one_process(situation, world)


@pytest.mark.parametrize(("case", "layout"), runs())
def test_report(pool, case, layout):
    """Weights after every step, losses and notes are those of one process."""
    mode, stage, *transport = layout.split("-")
    parallel = {**case.parallel, **({"transport": "torch"} if transport else {})}
    arguments = (case.situation, mode, int(stage), parallel)
    actual = pool.run(case.world, on_a_rank, *arguments, timeout=60)
    message = case.refused.get(layout, case.refused.get("*"))
    if message:
        assert all(isinstance(answer, str) and message in answer for answer in actual), actual[0]
        return
    expected = plainly(case.situation, case.world)
    lines = []
    for rank, answer in enumerate(actual):
        assert isinstance(answer, Result), answer
        lines += differences(expected, answer, rank, case.tolerance)
    assert not lines, "\n".join(lines[:8])


@pytest.mark.parametrize(
    "stage", [3, *(pytest.param(stage, marks=pytest.mark.proof) for stage in (0, 2))]
)
def test_report_fairscale_601(pool, tmp_path, stage):
    """A run of several parameter groups goes on from its checkpoint."""
    expected = steps.uninterrupted_with_groups(2)
    for actual in pool.run(2, steps.resumed_with_groups, stage, str(tmp_path), timeout=60):
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-12)


def test_report_pytorch_187732(pool):
    """`DistributedDataParallel(static_graph=True)` with `no_sync` reduces every step."""
    expected = plainly(steps.accumulated_twice, 2)
    for actual in pool.run(2, steps.static_graph, timeout=60):
        for ours, theirs in zip(expected.weights, actual, strict=True):
            for name, tensor in ours.items():
                torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", [3, *(pytest.param(s, marks=pytest.mark.proof) for s in (0, 2))])
def test_report_transformerengine_1860(pool, tmp_path, stage):
    """State that a module keeps by `get_extra_state` goes on from a checkpoint."""
    for expected, actual in pool.run(2, steps.resumed_with_extra_state, stage, str(tmp_path)):
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=1e-12)
