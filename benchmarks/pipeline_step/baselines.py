"""The layouts, and in each of them raw torch, raw torch a second time as a control, and Plait. All as data; see `training_step`."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.training_step.baselines import Baseline

HERE = "benchmarks.pipeline_step"
TARGET = 1.03
"""Plait's step time over raw torch's should be no more than this."""


@dataclass(frozen=True)
class Layout:
    """A way to split the model, and those who do it."""

    name: str
    title: str
    ranks: int
    slices: int
    micro_batch: int
    micro_batches: int
    baselines: tuple[Baseline, ...]
    """The first one is the reference."""


def _three(
    name: str, title: str, builder: str, options: dict[str, object], *, loss_is_global: bool
) -> tuple[Baseline, ...]:
    reference, plait = f"torch-{name}", f"plait-{name}"
    return (
        Baseline(
            reference,
            f"torch: {title}",
            f"{HERE}.torch_peers:{builder}",
            loss_is_global=loss_is_global,
        ),
        Baseline(
            f"{reference}-again",
            "the same, a second process group (control)",
            f"{HERE}.torch_peers:{builder}",
            peer=reference,
            loss_is_global=loss_is_global,
        ),
        Baseline(
            plait,
            "Plait",
            f"{HERE}.plait_entry:build",
            options,
            peer=reference,
            requires="plait",
            loss_is_global=True,
        ),
    )


LAYOUTS = (
    Layout(
        "1f1b",
        "pp 2, 1F1B",
        ranks=2,
        slices=1,
        micro_batch=1,
        micro_batches=8,
        baselines=_three(
            "1f1b", "Schedule1F1B and PipelineStage", "one_f_one_b", {"pp": 2}, loss_is_global=True
        ),
    ),
    Layout(
        "2d",
        "tp 2 x dp_shard 2, ZeRO 2",
        ranks=4,
        slices=2,
        micro_batch=2,
        micro_batches=1,
        baselines=_three(
            "2d",
            "fully_shard and parallelize_module",
            "two_dimensional",
            {"tp": 2, "dp_shard": 2, "stage": 2},
            loss_is_global=False,
        ),
    ),
)

BY_NAME = {one.name: (layout, one) for layout in LAYOUTS for one in layout.baselines}
