"""An engine as data: its name, what it is compared with, and the function that builds its step."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.steps.workload import Workload

Step = Callable[[dict[str, Tensor]], tuple[float, float | None]]
"""Runs an optimizer step on the samples of this rank. Returns the loss and the global gradient norm
before clipping, or None for a norm that the engine does not report."""


@dataclass(frozen=True)
class Baseline:
    """An engine that does the step."""

    name: str
    title: str
    builder: str
    """`module:function`, imported by the worker and called as `function(workload, **options)`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    against: Mapping[str, str] = field(default_factory=dict)
    """Column of the report to the baseline whose time divides this one's."""
    requires: str | None = None
    """Package that the machine may lack."""
    loss_is_global: bool = False
    """True if the loss of a step is already the mean over ranks."""
    floor: bool = False
    """True if its ranks train alone. Its losses are not compared."""
    checkout: Path | None = None
    """Another checkout of Plait, whose package the worker imports instead of the installed one."""

    @property
    def is_missing(self) -> bool:
        return self.requires is not None and find_spec(self.requires) is None

    def build(self, workload: Workload) -> Step:
        if self.checkout:
            sys.path.insert(0, str(self.checkout / "src"))
        module, function = self.builder.split(":")
        step: Step = getattr(import_module(module), function)(workload, **self.options)
        return step


@dataclass(frozen=True)
class Scene:
    """Baselines that take turns with each other. All of them are in memory at the same time."""

    name: str
    title: str
    baselines: tuple[Baseline, ...]
    """The first one is the reference of losses, and of the first column of ratios."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Fields of the workload."""


@dataclass(frozen=True)
class Benchmark:
    """A command, its scenes and its page."""

    name: str
    title: str
    columns: tuple[str, ...]
    """Titles of the columns of ratios. The first is that of the reference."""
    scenes: tuple[Scene, ...]
    target: float | None = None
    """Largest ratio of Plait to the reference that counts as reached."""


def beside(benchmark: Benchmark, checkout: Path) -> Benchmark:
    """Return the benchmark with the Plait of another checkout in every scene."""
    column = f"Plait of {checkout.name}"
    scenes = []
    for scene in benchmark.scenes:
        baselines: list[Baseline] = []
        for baseline in scene.baselines:
            if baseline.name.startswith("plait-"):
                name = f"beside-{baseline.name}"
                title = f"{baseline.title} of {checkout.name}"
                baselines.append(replace(baseline, name=name, title=title, checkout=checkout))
                baseline = replace(baseline, against={**baseline.against, column: name})
            baselines.append(baseline)
        scenes.append(replace(scene, baselines=tuple(baselines)))
    return replace(benchmark, columns=(*benchmark.columns, column), scenes=tuple(scenes))
